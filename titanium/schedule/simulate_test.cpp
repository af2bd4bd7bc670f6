#include "titanium/schedule/simulate.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"
#include "titanium/schedule/plan.h"
#include "titanium/schedule/print.h"
#include "titanium/schedule/stages.h"
#include "titanium/schedule/testing.h"

namespace titanium {
namespace {

struct Pipeline {
  std::vector<PlanTask> tasks;
  std::vector<Plan> plans;
  std::vector<PlanCosts> costs;
  std::shared_ptr<PipelineOrder> order;

  // A block a stage, each of which takes a second forward and one for either gradient.
  Pipeline(const std::string& schedule, int32_t ranks, int32_t local, int32_t micro_batches) {
    const int32_t stages = ranks * local;
    const ModelPart whole = dense(stages - 2);
    std::vector<int32_t> first;
    for (int32_t s = 0; s < stages; ++s) first.push_back(s);
    order = std::make_shared<PipelineOrder>(pipeline_order(schedule, ranks, local, micro_batches));
    const std::vector<RankPart> parts = split_model(whole, first, order->rank_of);
    for (int32_t r = 0; r < ranks; ++r) {
      tasks.push_back({parts[r].part, micro_batches, false, order, r});
      PlanCosts cost;
      cost.blocks.assign(parts[r].part.blocks.size(), {1, 1, 1, 0});
      cost.units.resize(parts[r].part.units.size());
      costs.push_back(cost);
    }
    PlanOptions options;
    options.pending_sends = 0;  // a sender does not wait for its receiver
    plans = make_plans(tasks, options);
  }
};

// As a plan has it where the last stage is the head alone (build.h).
PipelineOrder with_whole_head(PipelineOrder order) {
  for (auto& rank : order.ranks) {
    std::erase_if(rank, [&](const StageAction& a) {
      return a.kind == StageKind::kBackwardWeight && a.stage + 1 == order.stages();
    });
    for (StageAction& a : rank) {
      if (a.kind == StageKind::kBackwardInput && a.stage + 1 == order.stages()) a.kind = StageKind::kBackward;
    }
  }
  return order;
}

TEST(Simulate, APipelineWithoutTransfersTakesItsOrdersTime) {
  for (const auto& [schedule, local] :
       std::vector<std::pair<std::string, int32_t>>{{"GPipe", 1},
                                                    {"1F1B", 1},
                                                    {"Interleaved1F1B", 2},
                                                    {"LoopedBFS", 2},
                                                    {"InterleavedZeroBubble", 2},
                                                    {"ZBVZeroBubble", 2},
                                                    {"DualPipeV", 2}})
    for (const int32_t ranks : {2, 4})
      for (const int32_t micro_batches : {1, 3, 8}) {
        const Pipeline p(schedule, ranks, local, micro_batches);
        const Timeline timeline = simulate(p.plans, p.tasks, p.costs);
        const PipelineTime want = time_pipeline(with_whole_head(*p.order));
        // The first block's input gradient is nobody's: a plan may leave it out, an order does not.
        EXPECT_LE(timeline.seconds, want.total + 1e-9) << schedule << ranks << micro_batches;
        EXPECT_GE(timeline.seconds, want.total - micro_batches) << schedule << ranks << micro_batches;
        ASSERT_EQ(timeline.ranks.size(), static_cast<size_t>(ranks));
        EXPECT_NEAR(timeline.bubble(), want.bubble(), 0.1) << schedule << ranks << micro_batches;
      }
}

TEST(Simulate, TransfersDelayTheNextStageOnly) {
  Pipeline p("GPipe", 2, 1, 1);
  for (PlanCosts& cost : p.costs)
    for (auto& block : cost.blocks) block.transfer = 10;
  const Timeline timeline = simulate(p.plans, p.tasks, p.costs);
  // Forward, sent, forward and both gradients, sent back, both gradients.
  EXPECT_NEAR(timeline.seconds, 1 + 10 + 3 + 10 + 2, 1e-9);
  int transfers = 0;
  for (const auto& rank : timeline.ranks)
    for (const TimedAction& timed : rank.actions) {
      EXPECT_LE(timed.start, timed.end);
      transfers += timed.transfer;
    }
  EXPECT_EQ(transfers, 4);
}

TEST(Simulate, GathersGoOnBesideComputeOrNot) {
  PlanTask task{dense(3), 1, false, nullptr, 0};
  PlanCosts costs;
  costs.blocks.assign(5, {1, 1, 1, 0});
  costs.units.assign(5, {0.5, 0.25, 0, 0});
  const std::vector<Plan> plans{make_plan(task)};
  // One gather before the first block and one reduction after the last one cannot hide.
  costs.update = 7;
  const Timeline beside = simulate(plans, {task}, {costs});
  EXPECT_NEAR(beside.seconds, 0.5 + 15 + 0.25 + 7, 1e-9);
  EXPECT_NEAR(beside.bubble(), 0.75 / 22.75, 1e-9);
  costs.overlap = false;
  size_t gathers = 0, reductions = 0;
  for (const Action& a : plans[0]) {
    gathers += a.kind == Kind::kUnshard && a.half != Half::kWait;
    reductions += a.kind == Kind::kReduce && a.half != Half::kWait;
  }
  EXPECT_NEAR(simulate(plans, {task}, {costs}).seconds,
              15 + 7 + 0.5 * static_cast<double>(gathers) + 0.25 * static_cast<double>(reductions), 1e-9);
  costs.units.assign(5, {0, 0, 0.125, 0});  // casts alone
  EXPECT_NEAR(simulate(plans, {task}, {costs}).seconds, 15 + 7 + 0.125 * static_cast<double>(gathers), 1e-9);
}

TEST(Simulate, ATiedUnitIsWaitedForByAllItsRanks) {
  auto order = std::make_shared<PipelineOrder>(pipeline_order("1F1B", 2, 1, 2));
  const std::vector<RankPart> parts = split_model(dense(2, /*tied=*/true), {0, 2}, order->rank_of);
  std::vector<PlanTask> tasks;
  std::vector<PlanCosts> costs;
  for (int32_t r = 0; r < 2; ++r) {
    tasks.push_back({parts[r].part, 2, false, order, r});
    PlanCosts cost;
    cost.blocks.assign(parts[r].part.blocks.size(), {1, 1, 1, 0});
    for (const PlanUnit& unit : parts[r].part.units)
      cost.units.push_back(unit.spans >= 0 ? PlanCosts::Unit{3, 5, 0, 0} : PlanCosts::Unit{});
    costs.push_back(cost);
  }
  const std::vector<Plan> plans = make_plans(tasks);
  const Timeline timeline = simulate(plans, tasks, costs);
  double reduced[2] = {};
  for (size_t r = 0; r < 2; ++r)
    for (const TimedAction& timed : timeline.ranks[r].actions)
      if (timed.transfer && plans[r][timed.action].kind == Kind::kReduce) reduced[r] = timed.end;
  EXPECT_GT(reduced[0], 5);
  EXPECT_EQ(reduced[0], reduced[1]);
  EXPECT_NEAR(timeline.seconds, reduced[0], 1e-9);
}

TEST(Simulate, WhatWaitsForEverIsABug) {
  Pipeline p("1F1B", 2, 1, 2);
  p.plans[0].erase(std::find_if(p.plans[0].begin(), p.plans[0].end(),
                                [](const Action& a) { return a.kind == Kind::kSendOutput; }));
  EXPECT_THROW(simulate(p.plans, p.tasks, p.costs), Bug);
  p.costs.pop_back();
  EXPECT_THROW(simulate(p.plans, p.tasks, p.costs), Bug);
}

}  // namespace
}  // namespace titanium
