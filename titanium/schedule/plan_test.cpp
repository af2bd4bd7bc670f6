#include "titanium/schedule/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "titanium/base/error.h"
#include "titanium/schedule/build.h"
#include "titanium/schedule/check.h"
#include "titanium/schedule/passes/passes.h"
#include "titanium/schedule/passes/runs.h"
#include "titanium/schedule/print.h"
#include "titanium/schedule/testing.h"

namespace titanium {
namespace {

constexpr uint64_t kRandomCases = 5000;

// Every file of tests/plans: its head says what to plan, the rest is the plan.  With TITANIUM_WRITE_PLANS set
// the files are written anew, to be read as a diff.
TEST(Golden, PlansAreAsWritten) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TITANIUM_SOURCE_DIR "/tests/plans")) {
    if (entry.path().extension() != ".txt") continue;
    ++files;
    std::stringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    std::string head, body;
    for (std::string line; std::getline(text, line);) (line.starts_with('#') ? head : body) += line + '\n';
    const PlanCase c = read_case(head);
    const std::string made = print_plan(make_plan(c.task, c.options));
    if (std::getenv("TITANIUM_WRITE_PLANS")) {
      std::ofstream(entry.path()) << head << made;
    } else {
      EXPECT_EQ(made, body) << entry.path();
    }
  }
  EXPECT_GE(files, 20);
}

Plan without(Plan plan, std::initializer_list<Kind> kinds) {
  std::erase_if(
      plan, [&](const Action& a) { return std::find(kinds.begin(), kinds.end(), a.kind) != kinds.end(); });
  return plan;
}

TEST(MakePlan, EveryPlanPassesTheCheck) {
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) {
    const PlanCase c = random_case(seed);
    ASSERT_NO_THROW(check(make_plan(c.task, c.options), c.task)) << seed << ' ' << describe(c);
  }
}

// What is added never changes the order of the work itself (D5 rests on it).
TEST(MakePlan, PassesLeaveTheBuiltListAsItIs) {
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) {
    const PlanCase c = random_case(seed);
    Plan work = without(make_plan(c.task, c.options), {Kind::kUnshard, Kind::kReshard, Kind::kReduce,
                                                       Kind::kOffload, Kind::kOnload, Kind::kRecompute});
    for (Action& a : work) {
      if (a.save == Save::kInput) a.save = Save::kAll;
    }
    ASSERT_EQ(work, build(c.task)) << seed << ' ' << describe(c);
  }
}

TEST(MakePlan, DependsOnNothingButItsArguments) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const PlanCase a = random_case(seed), b = random_case(seed);
    EXPECT_EQ(make_plan(a.task, a.options), make_plan(b.task, b.options));
  }
}

TEST(MakePlan, RecomputeCoversTheChosenBlocksOnly) {
  for (const int32_t n : {1, 2, 3, 7}) {
    const PlanTask task{.part = dense(6), .micro_batches = 2};
    PlanOptions options;
    options.recompute = Recompute::kEveryNth;
    options.recompute_every = n;
    std::set<int32_t> blocks;
    for (const Action& a : make_plan(task, options)) {
      if (a.kind == Kind::kRecompute) blocks.insert(a.block);
    }
    std::set<int32_t> expected;  // layers are blocks 1..6
    for (int32_t layer = n; layer <= 6; layer += n) expected.insert(layer);
    EXPECT_EQ(blocks, expected) << n;
  }
}

TEST(MakePlan, GatherStartsNoEarlierThanThePrefetch) {
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) {
    PlanCase c = random_case(seed);
    c.options.disabled_passes.clear();
    const Plan plan = make_plan(c.task, c.options);
    const std::vector<BlockRun> work = block_runs(plan);
    // Steps begun before an index of the plan.
    const auto step_at = [&](size_t i) {
      return std::upper_bound(work.begin(), work.end(), i,
                              [](size_t v, const BlockRun& s) { return v < s.first; }) -
             work.begin();
    };
    std::map<int32_t, size_t> started;
    for (size_t i = 0; i < plan.size(); ++i) {
      if (plan[i].kind != Kind::kUnshard) continue;
      if (plan[i].half == Half::kStart) {
        started[plan[i].unit] = i;
      } else {
        ASSERT_LE(step_at(i) - step_at(started[plan[i].unit]), c.options.prefetch)
            << seed << ' ' << describe(c);
      }
    }
  }
}

// Under `default` and `always` no more is gathered than the step's own units and those of the steps to come.
TEST(MakePlan, GathersNoMoreThanThePrefetchWindow) {
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) {
    PlanCase c = random_case(seed);
    if (c.options.reshard_after_forward == Reshard::kNever) continue;
    c.options.disabled_passes.clear();
    const Plan plan = make_plan(c.task, c.options);
    const std::vector<BlockRun> work = block_runs(plan);
    std::set<int32_t> gathered;
    size_t next = 0;
    for (size_t i = 0; i < plan.size(); ++i) {
      const Action& a = plan[i];
      if (a.kind == Kind::kUnshard && a.half == Half::kStart) gathered.insert(a.unit);
      if (a.kind == Kind::kReshard) gathered.erase(a.unit);
      if (next == work.size() || i != work[next].first) continue;
      std::set<int32_t> allowed;
      for (size_t s = next; s < work.size() && s <= next + static_cast<size_t>(c.options.prefetch); ++s) {
        const auto& units = c.task.part.blocks[work[s].block].units;
        allowed.insert(units.begin(), units.end());
      }
      ASSERT_TRUE(std::includes(allowed.begin(), allowed.end(), gathered.begin(), gathered.end()))
          << seed << ' ' << describe(c);
      ++next;
    }
  }
}

// Under `default` a unit is away during some work, or it stays.
TEST(MakePlan, GivesNothingBackToGatherItAgainAtOnce) {
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) {
    PlanCase c = random_case(seed);
    c.options.reshard_after_forward = Reshard::kDefault;
    std::set<int32_t> just_given_back;
    for (const Action& a : make_plan(c.task, c.options)) {
      if (uses_weights(a.kind)) just_given_back.clear();
      if (a.kind == Kind::kReshard) just_given_back.insert(a.unit);
      ASSERT_FALSE(a.kind == Kind::kUnshard && just_given_back.contains(a.unit))
          << seed << ' ' << describe(c);
    }
  }
}

TEST(MakePlan, NeverGathersEachUnitOnce) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    PlanCase c = random_case(seed);
    c.options.reshard_after_forward = Reshard::kNever;
    std::map<int32_t, int> starts;
    for (const Action& a : make_plan(c.task, c.options)) {
      if (a.kind == Kind::kUnshard && a.half == Half::kStart) ++starts[a.unit];
    }
    for (const auto& [unit, count] : starts) ASSERT_EQ(count, 1) << unit << ' ' << describe(c);
  }
}

TEST(MakePlan, ReducesAsOftenAsAskedAndNoMoreAtOnceThanAllowed) {
  for (uint64_t seed = 0; seed < kRandomCases; ++seed) {
    PlanCase c = random_case(seed);
    c.options.disabled_passes.clear();
    const bool each = c.options.reduce == ReduceWhen::kEachMicroBatch;
    std::map<int32_t, int> starts;
    int pending = 0, most = 0;
    for (const Action& a : make_plan(c.task, c.options)) {
      if (a.kind != Kind::kReduce) continue;
      pending += a.half == Half::kStart ? 1 : -1;
      most = std::max(most, pending);
      if (a.half == Half::kStart) ++starts[a.unit];
    }
    ASSERT_TRUE(c.options.pending_reduces == 0 || most <= c.options.pending_reduces) << describe(c);
    std::set<int32_t> trained;
    for (const auto& block : c.task.part.blocks) {
      for (const int32_t u : block.units) {
        if (c.task.part.units[u].trainable && !c.task.forward_only) trained.insert(u);
      }
    }
    ASSERT_EQ(starts.size(), trained.size()) << describe(c);
    for (const auto& [unit, count] : starts) ASSERT_EQ(count, each ? c.task.micro_batches : 1) << describe(c);
  }
}

TEST(MakePlan, NamesTheTimeOfEachPassAndLeavesOutTheDisabled) {
  const PlanTask task{.part = dense(2)};
  PlanOptions options;
  options.recompute = Recompute::kFull;
  options.offload_every = 1;
  options.disabled_passes = {"recompute", "offload"};
  std::vector<PassTime> times;
  const Plan plan = make_plan(task, options, &times);
  std::vector<std::string> ran;
  for (const PassTime& t : times) ran.push_back(t.pass);
  EXPECT_EQ(ran, (std::vector<std::string>{"build", "unshard", "reduce"}));
  EXPECT_EQ(times.back().actions, plan.size());
  EXPECT_EQ(plan, make_plan(task, {}));
}

std::string refusal(const PlanTask& task, const PlanOptions& options = {}) {
  try {
    make_plan(task, options);
  } catch (const Error& error) {
    return std::string(name(error.kind())) + ": " + error.what();
  }
  return "accepted";
}

TEST(MakePlan, RefusesOptionsByName) {
  const PlanTask task{.part = dense(1)};
  PlanOptions o;
  o.prefetch = -1;
  EXPECT_EQ(refusal(task, o), "BadConfig: plan option prefetch: -1 given, at least 0 allowed");
  o = {};
  o.recompute_every = 0;
  EXPECT_EQ(refusal(task, o), "BadConfig: plan option recompute_every: 0 given, at least 1 allowed");
  o = {};
  o.pending_reduces = -2;
  EXPECT_EQ(refusal(task, o), "BadConfig: plan option pending_reduces: -2 given, at least 0 allowed");
  o = {};
  o.offload_every = -1;
  EXPECT_EQ(refusal(task, o), "BadConfig: plan option offload_every: -1 given, at least 0 allowed");
  o = {};
  o.disabled_passes = {"shard"};
  EXPECT_EQ(refusal(task, o),
            "BadConfig: plan option disabled_passes: 'shard' given, allowed are recompute, offload, unshard, "
            "reduce");
}

TEST(MakePlan, RefusesTasksThatAreNone) {
  EXPECT_EQ(refusal({.part = dense(1), .micro_batches = 0}),
            "Bug: plan: 0 micro-batches, at least 1 is needed");
  EXPECT_EQ(refusal({.part = ModelPart::whole({{{1}, true}}, {{true}})}),
            "Bug: plan: block 0 names unit 1, there are 1");
  EXPECT_EQ(refusal({.part = {}}), "Bug: plan: stages hold 0 of 0 blocks");
  PlanTask task{.part = dense(2)};
  task.part.stages = {{0, 2}, {3, 1}};
  EXPECT_EQ(refusal(task),
            "Bug: plan: a stage of 1 blocks starts at block 3; 2 of 4 blocks are in stages so far");
  task.part.stages = {{0, 2, true, false, false}, {2, 2, false, true, true}};
  EXPECT_EQ(refusal(task),
            "BadConfig: plan: without a pipeline's order the whole model is one stage, 2 stages given");
}

TEST(MakePlan, LargePlansTakeMilliseconds) {
  const PlanTask task{.part = dense(198), .micro_batches = 64};  // 200 blocks
  PlanOptions options;
  options.recompute = Recompute::kFull;
  double best = 1e9;
  size_t actions = 0;
  for (int i = 0; i < 7; ++i) {
    const auto start = std::chrono::steady_clock::now();
    actions = make_plan(task, options).size();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::printf("200 blocks x 64 micro-batches: %zu actions in %.1f ms\n", actions, best * 1e3);
#if defined(NDEBUG) && !defined(TITANIUM_NO_CLONES)  // not under sanitizers
  EXPECT_LT(best, 0.050);
#endif
}

}  // namespace
}  // namespace titanium
