// Plans of all pipeline ranks: complete, and they end together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/schedule/check.h"
#include "titanium/schedule/plan.h"
#include "titanium/schedule/print.h"
#include "titanium/schedule/simulate.h"
#include "titanium/schedule/stages.h"
#include "titanium/schedule/testing.h"

namespace titanium {
namespace {

struct Case {
  std::string schedule;
  int32_t ranks, local, layers, micro_batches;
  bool tied, forward_only;
  std::vector<PlanTask> tasks;
  PlanOptions options;

  std::string text() const {
    return fmt::format("{} {}x{}, {} layers{}, {} micro-batches{}", schedule, ranks, local, layers,
                       tied ? ", tied" : "", micro_batches, forward_only ? ", forward" : "");
  }
};

const char* const kNames[] = {
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"};

void add_tasks(Case& c, ModelPart whole) {
  const auto stages = c.ranks * c.local;
  const std::vector<int32_t> first = split_by_cost(std::vector<double>(whole.blocks.size(), 1), stages);
  auto order = std::make_shared<PipelineOrder>(pipeline_order(c.schedule, c.ranks, c.local, c.micro_batches));
  if (c.forward_only) *order = forwards_of(*order);
  const std::vector<RankPart> parts = split_model(whole, first, order->rank_of);
  for (int32_t r = 0; r < c.ranks; ++r)
    c.tasks.push_back({parts[r].part, c.micro_batches, c.forward_only, order, r});
}

Case random_pipeline(uint64_t seed) {
  const Random random(seed, Purpose::kTest);
  uint64_t counter = 0;
  const auto below = [&](uint64_t n) { return static_cast<int32_t>(random.below(counter++, n)); };
  Case c;
  c.schedule = kNames[below(7)];
  const PipelineSchedule& schedule = pipeline_schedule(c.schedule);
  c.ranks = 1 + below(4);
  c.local = schedule.one_stage ? 1 : schedule.placement == StagePlacement::kV ? 2 : 2 + below(2);
  c.layers = c.ranks * c.local + below(4);
  c.micro_batches = 1 + below(9);
  c.tied = below(2) == 0;
  c.forward_only = below(5) == 0;
  ModelPart whole = dense(c.layers, c.tied);
  const int32_t frozen = below(4) == 0 ? below(static_cast<uint64_t>(c.layers)) : 0;  // from below
  for (int32_t u = 0; u < frozen; ++u) whole.units[u].trainable = false;
  add_tasks(c, whole);
  PlanOptions& o = c.options;
  o.recompute = static_cast<Recompute>(below(3));
  o.reshard_after_forward = static_cast<Reshard>(below(3));
  o.prefetch = below(3);
  o.reduce = static_cast<ReduceWhen>(below(2));
  o.pending_reduces = below(4);
  o.pending_sends = below(3);
  o.offload_every = below(3);
  return c;
}

TEST(PipelinePlans, AllEndTogether) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const Case c = random_pipeline(seed);
    std::vector<Plan> plans;
    ASSERT_NO_THROW(plans = make_plans(c.tasks, c.options)) << seed << ' ' << c.text();
    for (int32_t r = 0; r < c.ranks; ++r)
      ASSERT_NO_THROW(check(plans[r], c.tasks[r])) << seed << ' ' << c.text();
    // make_plans has checked them together; the simulator is the second opinion.
    std::vector<PlanCosts> costs;
    for (const PlanTask& task : c.tasks) {
      PlanCosts& cost = costs.emplace_back();
      cost.blocks.assign(task.part.blocks.size(), {1, 1, 1, 0.1});
      cost.units.assign(task.part.units.size(), {0.1, 0.1, 0, 0});
    }
    const Timeline timeline = simulate(plans, c.tasks, costs);
    double way = 0;  // of one micro-batch through all stages
    for (int32_t r = 0; r < c.ranks; ++r) {
      const ModelPart& part = c.tasks[r].part;
      const std::vector<bool> backward = part.backward_blocks();
      const auto has_backward = std::count(backward.begin(), backward.end(), true);
      const auto again = std::count_if(plans[r].begin(), plans[r].end(),
                                       [](const Action& a) { return a.kind == Kind::kRecompute; });
      const auto forwards = static_cast<double>(part.blocks.size());
      const double work = forwards + (c.forward_only ? 0 : 2.0 * static_cast<double>(has_backward));
      ASSERT_NEAR(timeline.ranks[r].busy, c.micro_batches * work + static_cast<double>(again), 1e-6)
          << seed << ' ' << c.text() << " rank " << r;
      ASSERT_GE(timeline.seconds, timeline.ranks[r].busy - 1e-6) << seed << ' ' << c.text();
      way += forwards;
      for (const PlanStage& stage : part.stages) way += stage.sends() ? 0.1 : 0;
    }
    ASSERT_GE(timeline.seconds, way - 1e-6) << seed << ' ' << c.text();
  }
}

bool accepted(const std::vector<Plan>& plans, const Case& c) {
  try {
    for (int32_t r = 0; r < c.ranks; ++r) check(plans[r], c.tasks[r]);
    check_together(plans, c.tasks);
    return true;
  } catch (const Bug&) {
    return false;
  }
}

// One rank's plan broken in every way that leaves out, doubles, or moves a transfer.
TEST(PipelinePlans, BrokenOnesAreRefused) {
  int broken = 0;
  for (uint64_t seed = 0; seed < 120; ++seed) {
    Case c = random_pipeline(seed);
    if (c.ranks == 1) continue;
    const std::vector<Plan> plans = make_plans(c.tasks, c.options);
    for (int32_t r = 0; r < c.ranks; ++r) {
      for (size_t i = 0; i < plans[r].size(); ++i) {
        std::vector<Plan> missing = plans, twice = plans;
        missing[r].erase(missing[r].begin() + static_cast<int64_t>(i));
        twice[r].insert(twice[r].begin() + static_cast<int64_t>(i), plans[r][i]);
        ASSERT_FALSE(accepted(missing, c))
            << seed << ' ' << c.text() << " without " << to_string(plans[r][i]);
        ASSERT_FALSE(accepted(twice, c)) << seed << ' ' << c.text() << " twice " << to_string(plans[r][i]);
        broken += 2;
      }
    }
  }
  EXPECT_GT(broken, 5000);
}

// Two matrices that two stages share: gathered in another order on one of the ranks.
TEST(PipelinePlans, SharedUnitsHaveOneOrder) {
  Case c{"1F1B", 2, 1, 2, 2, false, false, {}, {}};
  ModelPart whole = dense(2, /*tied=*/true);
  const auto both = static_cast<int32_t>(whole.units.size());
  whole.units.push_back({});
  whole.blocks.front().units.push_back(both);
  whole.blocks.back().units.push_back(both);
  add_tasks(c, whole);
  std::vector<Plan> plans = make_plans(c.tasks, c.options);
  std::vector<Action*> gathers;
  for (Action& a : plans[1]) {
    if (a.kind == Kind::kUnshard && a.half == Half::kStart && c.tasks[1].part.units[a.unit].spans >= 0)
      gathers.push_back(&a);
  }
  ASSERT_EQ(gathers.size(), 2U);
  check_together(plans, c.tasks);
  std::swap(*gathers[0], *gathers[1]);
  EXPECT_THROW(check_together(plans, c.tasks), Bug);
}

Case by_name(const char* schedule, int32_t ranks, int32_t local, int32_t layers, int32_t micro_batches) {
  Case c{schedule, ranks, local, layers, micro_batches, false, false, {}, {}};
  add_tasks(c, dense(layers));
  return c;
}

// tests/plans/pipelines/<schedule>_<ranks>x<stages of each>_<micro-batches>.txt: the plan of every rank, of a
// tied model of a layer a stage.  With TITANIUM_WRITE_PLANS set the files are written anew, to be read as a
// diff.
TEST(PipelinePlans, AreAsWritten) {
  const std::filesystem::path folder = TITANIUM_SOURCE_DIR "/tests/plans/pipelines";
  for (const char* name : kNames) {
    const int32_t local = pipeline_schedule(name).one_stage ? 1 : 2;
    for (const int32_t ranks : {2, 4}) {
      for (const int32_t micro_batches : {4, 8}) {
        Case c{name, ranks, local, ranks * local, micro_batches, true, false, {}, {}};
        add_tasks(c, dense(c.layers, c.tied));
        const std::vector<Plan> plans = make_plans(c.tasks, c.options);
        std::string made;
        for (int32_t r = 0; r < ranks; ++r) {
          EXPECT_EQ(parse_plan(print_plan(plans[r])), plans[r]) << c.text() << " rank " << r;
          made += fmt::format("# rank {}\n{}", r, print_plan(plans[r]));
        }
        const auto file = folder / fmt::format("{}_{}x{}_{}.txt", name, ranks, local, micro_batches);
        if (std::getenv("TITANIUM_WRITE_PLANS")) {
          std::ofstream(file) << made;
          continue;
        }
        std::stringstream text;
        text << std::ifstream(file).rdbuf();
        EXPECT_EQ(made, text.str()) << file;
      }
    }
  }
}

TEST(PipelinePlans, RanksThatWaitForEachOtherAreNamed) {
  const Case c = by_name("1F1B", 2, 1, 2, 2);
  std::vector<Plan> plans = make_plans(c.tasks, c.options);
  // Rank 1 asks for the second input before the first has come: another order than rank 0 sends in.
  for (Action& a : plans[1]) {
    if (a.kind == Kind::kRecvInput && a.half == Half::kStart) a.micro_batch = 1 - a.micro_batch;
  }
  EXPECT_THROW(check_together(plans, c.tasks), Bug);
  const Case one = by_name("1F1B", 2, 1, 2, 1);
  plans = make_plans(one.tasks, one.options);
  // Rank 0 waits for its gradient before it sends what that follows from.
  Plan& first = plans[0];
  const auto send =
      std::find_if(first.begin(), first.end(), [](const Action& a) { return a.kind == Kind::kSendOutput; });
  const Action moved = *send;
  first.erase(send);
  const auto wait = std::find_if(first.begin(), first.end(), [](const Action& a) {
    return a.kind == Kind::kRecvOutputGrad && a.half == Half::kWait;
  });
  first.insert(wait + 1, moved);
  std::vector<PlanCosts> costs(2);
  for (size_t r = 0; r < 2; ++r) {
    costs[r].blocks.resize(one.tasks[r].part.blocks.size());
    costs[r].units.resize(one.tasks[r].part.units.size());
  }
  EXPECT_THROW(simulate(plans, one.tasks, costs), Bug);
  try {
    check_together(plans, one.tasks);
    FAIL();
  } catch (const Bug& e) {
    EXPECT_NE(std::string(e.what()).find("rank 0 in action"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("rank 1 in action"), std::string::npos) << e.what();
  }
}

TEST(Stages, SplitByCost) {
  EXPECT_EQ(split_by_cost({1, 1, 1, 1}, 2), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(split_by_cost({0, 1, 1, 1, 1, 2}, 2), (std::vector<int32_t>{0, 4}));
  EXPECT_EQ(split_by_cost({0, 1, 1, 1, 1, 4}, 2), (std::vector<int32_t>{0, 5}));
  EXPECT_EQ(split_by_cost({0, 5, 1, 1}, 4), (std::vector<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(split_by_cost({1, 1, 1, 1, 1}, 2), (std::vector<int32_t>{0, 2}));
  // A head that costs as much as eight layers leaves the others even.
  EXPECT_EQ(split_by_cost({0, 1, 1, 1, 1, 1, 1, 1, 1, 8}, 5), (std::vector<int32_t>{0, 3, 5, 7, 9}));
  EXPECT_EQ(split_by_cost({0, 8, 1, 1, 1, 1, 1, 1}, 4), (std::vector<int32_t>{0, 2, 4, 6}));
  EXPECT_EQ(split_by_cost({0, 0, 0}, 2), (std::vector<int32_t>{0, 1}));
  EXPECT_THROW(split_by_cost({1, 1}, 3), BadConfig);
}

TEST(Stages, SplitByLayers) {
  EXPECT_EQ(split_by_layers(4, 2, 1, 1), (std::vector<int32_t>{0, 3}));
  EXPECT_EQ(split_by_layers(8, 4, 1, 1), (std::vector<int32_t>{0, 3, 6, 8}));  // torchtitan: 2 + 3 + 2 + 1
  EXPECT_EQ(split_by_layers(4, 4, 0, 0), (std::vector<int32_t>{0, 2, 3, 4}));
  EXPECT_THROW(split_by_layers(2, 4, 1, 3), BadConfig);
}

}  // namespace
}  // namespace titanium
