#include "titanium/schedule/memory.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"
#include "titanium/schedule/plan.h"
#include "titanium/schedule/print.h"
#include "titanium/schedule/testing.h"

namespace titanium {
namespace {

// Embedding, `layers` layers and a head; every layer alike.
PlanBytes bytes_of(int32_t layers) {
  PlanBytes bytes;
  bytes.blocks.push_back({.input = 1, .saved = 2, .forward_work = 0, .backward_work = 3});
  for (int32_t i = 0; i < layers; ++i) {
    bytes.blocks.push_back({.input = 10, .saved = 100, .forward_work = 20, .backward_work = 30});
  }
  bytes.blocks.push_back({.input = 10, .saved = 10, .forward_work = 5, .backward_work = 6});
  bytes.units.assign(static_cast<size_t>(layers) + 2, {.weights = 1000, .gradient = 2000});
  return bytes;
}

MemoryEstimate estimate(int32_t layers, const PlanOptions& options, int32_t micro_batches = 1,
                        bool forward_only = false) {
  const PlanTask task{.part = dense(layers), .micro_batches = micro_batches, .forward_only = forward_only};
  return simulate_memory(make_plan(task, options), task, bytes_of(layers));
}

TEST(Memory, ByHandActionByAction) {
  const PlanTask task{.part = ModelPart::whole({{{0}, true}}, {{true}})};
  const Plan plan = parse_plan(
      "> unshard 0 | . unshard 0 | forward 0 drop | loss | recompute 0 | backward 0 | > reduce 0 | reshard 0 "
      "| "
      ". reduce 0");
  const PlanBytes bytes{{{.input = 10, .saved = 100, .forward_work = 20, .backward_work = 30}},
                        {{.weights = 1000, .gradient = 2000}}};
  const MemoryEstimate e = simulate_memory(plan, task, bytes);
  EXPECT_EQ(e.action, 5);  // backward: weights 1000, gradient 2000, input 10, recomputed 90, work 30
  EXPECT_EQ(e.at_peak.weights, 1000);
  EXPECT_EQ(e.at_peak.gradients, 2000);
  EXPECT_EQ(e.at_peak.activations, 10);
  EXPECT_EQ(e.at_peak.recompute, 90);
  EXPECT_EQ(e.at_peak.work, 30);
  EXPECT_EQ(e.at_peak.total(), 3130);
  EXPECT_EQ(e.host, 0);
}

// Where no unit has a gradient, the buffers of the last run are there all the same.
TEST(Memory, BuffersOfUnitsAreKeptForTheNextRun) {
  const PlanTask task{.part = ModelPart::whole({{{0}, true}, {{1}, true}}, {{true}, {true}})};
  const Plan plan = parse_plan(
      "> unshard 0 | . unshard 0 | forward 0 keep | reshard 0 | > unshard 1 | . unshard 1 | forward 1 keep | "
      "loss | backward 1 | > reduce 1 | reshard 1 | > unshard 0 | . unshard 0 | backward 0 | > reduce 0 | "
      "reshard 0 | . reduce 1 | . reduce 0");
  const PlanBytes bytes{{{.input = 1, .saved = 5, .forward_work = 9000}, {.input = 1, .saved = 2}},
                        {{.weights = 100, .gradient = 1000}, {.weights = 300, .gradient = 3000}}};
  std::vector<MemoryUse> over_plan;
  const MemoryEstimate e = simulate_memory(plan, task, bytes, &over_plan);
  EXPECT_EQ(e.action, 2);
  EXPECT_EQ(e.at_peak.weights, 100);
  EXPECT_EQ(e.at_peak.gradients, 0);
  EXPECT_EQ(e.at_peak.pooled, 300 + 1000 + 3000);
  EXPECT_EQ(e.at_peak.total(), 100 + 4300 + 5 + 9000);
  // The head forms its gradient in its forward.
  EXPECT_EQ(over_plan.at(6).gradients, 3000);
  EXPECT_EQ(over_plan.at(6).pooled, 100 + 1000);
  EXPECT_EQ(over_plan.at(13).gradients, 4000);
  EXPECT_EQ(over_plan.at(13).pooled, 300);
  EXPECT_EQ(over_plan.back().pooled, 400 + 3000);
}

// What one unit gives back serves another of its size, weights and gradients alike.
TEST(Memory, BuffersOfOneSizeServeEachOther) {
  const PlanTask task{.part = ModelPart::whole({{{0}, true}, {{1}, true}}, {{true}, {true}})};
  const Plan plan = parse_plan(
      "> unshard 0 | . unshard 0 | forward 0 keep | reshard 0 | > unshard 1 | . unshard 1 | forward 1 keep | "
      "loss | backward 1 | reshard 1 | > reduce 1 | . reduce 1");
  const PlanBytes bytes{{{}, {}}, {{.weights = 100}, {.weights = 100, .gradient = 100}}};
  std::vector<MemoryUse> over_plan;
  simulate_memory(plan, task, bytes, &over_plan);
  EXPECT_EQ(over_plan.at(2).pooled, 100);  // of two; the head has both in use
  EXPECT_EQ(over_plan.at(6).pooled, 0);
}

TEST(Memory, PeaksOfTheRecomputeModes) {
  PlanOptions o;
  EXPECT_EQ(estimate(4, o).peak.activations, 2 + 4 * 100 + 10);
  EXPECT_EQ(estimate(4, o).peak.recompute, 0);
  o.recompute = Recompute::kFull;
  EXPECT_EQ(estimate(4, o).peak.activations, 2 + 4 * 10 + 10);
  EXPECT_EQ(estimate(4, o).peak.recompute, 90);
  o.recompute = Recompute::kEveryNth;
  EXPECT_EQ(estimate(4, o).peak.activations, 2 + 2 * 10 + 2 * 100 + 10);
  EXPECT_EQ(estimate(4, o).peak.recompute, 90);
  EXPECT_EQ(estimate(4, {}, 3).peak.activations, estimate(4, {}, 1).peak.activations);
  EXPECT_EQ(estimate(4, {}, 2, true).peak.activations, 0);
  EXPECT_EQ(estimate(4, {}, 2, true).peak.gradients, 0);
  EXPECT_EQ(estimate(4, {}, 2, true).peak.work, 20);
}

TEST(Memory, PeaksOfTheGatherAndReducePolicies) {
  PlanOptions o;
  EXPECT_EQ(estimate(6, o).peak.weights, 2 * 1000);
  o.prefetch = 0;
  EXPECT_EQ(estimate(6, o).peak.weights, 1000);
  o.prefetch = 3;
  EXPECT_EQ(estimate(6, o).peak.weights, 4 * 1000);
  o.reshard_after_forward = Reshard::kNever;
  EXPECT_EQ(estimate(6, o).peak.weights, 8 * 1000);
  o = {};
  o.pending_reduces = 1;  // the one in flight, and the one that the backward fills
  EXPECT_EQ(estimate(6, o).peak.gradients, 2 * 2000);
  o.pending_reduces = 0;
  EXPECT_EQ(estimate(6, o).peak.gradients, 8 * 2000);
  o.pending_reduces = 1;
  EXPECT_EQ(estimate(6, o, 2).peak.gradients, 8 * 2000);
  o.reduce = ReduceWhen::kEachMicroBatch;
  EXPECT_EQ(estimate(6, o, 2).peak.gradients, 2 * 2000);
}

TEST(Memory, OffloadedBytesAreOnTheHost) {
  PlanOptions o;
  o.offload_every = 1;
  const MemoryEstimate with = estimate(8, o), without = estimate(8, {});
  EXPECT_EQ(with.host, 7 * 100);  // the last layer's backward is near
  EXPECT_LT(with.peak.activations, without.peak.activations / 2);
  o.recompute = Recompute::kFull;
  EXPECT_EQ(estimate(8, o).host, 7 * 10);
}

// Nothing is left over, whatever the plan: the peaks of a plan and of the same plan twice are the same.
TEST(Memory, EverythingIsGivenBack) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const PlanCase c = random_case(seed);
    PlanBytes bytes;
    bytes.blocks.assign(c.task.part.blocks.size(),
                        {.input = 3, .saved = 50, .forward_work = 7, .backward_work = 9});
    bytes.units.assign(c.task.part.units.size(), {.weights = 1000, .gradient = 2000});
    const Plan once = make_plan(c.task, c.options);
    Plan twice = once;
    twice.insert(twice.end(), once.begin(), once.end());
    const MemoryEstimate a = simulate_memory(once, c.task, bytes), b = simulate_memory(twice, c.task, bytes);
    ASSERT_EQ(a.at_peak.total(), b.at_peak.total()) << describe(c);
    ASSERT_EQ(a.action, b.action);
    ASSERT_EQ(a.peak.total(), b.peak.total());
    ASSERT_EQ(a.host, b.host);
    ASSERT_GE(a.peak.total(), a.at_peak.total());
  }
}

TEST(Memory, RefusesBytesOfAnotherModel) {
  const PlanTask task{.part = dense(2)};
  try {
    simulate_memory(make_plan(task), task, bytes_of(3));
    FAIL();
  } catch (const Bug& error) {
    EXPECT_STREQ(error.what(), "plan memory: bytes of 5 blocks and 5 units given for 4 and 4");
  }
  EXPECT_EQ(simulate_memory({}, task, bytes_of(2)).action, -1);
}

}  // namespace
}  // namespace titanium
