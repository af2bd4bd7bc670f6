#include "titanium/schedule/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/schedule/plan.h"
#include "titanium/schedule/print.h"
#include "titanium/schedule/testing.h"

namespace titanium {
namespace {

std::string refusal(const Plan& plan, const PlanTask& task, CheckScope scope = {}) {
  try {
    check(plan, task, scope);
  } catch (const Bug& error) {
    return error.what();
  }
  return "accepted";
}

bool accepts(const Plan& plan, const PlanTask& task) {
  return refusal(plan, task) == "accepted";
}

// --- Mutations
// -------------------------------------------------------------------------------------------------

constexpr uint64_t kMutatedCases = 400;

// Every action is needed: a plan without it is refused.
TEST(CheckMutations, RefusesEveryPlanWithAnActionLeftOut) {
  for (uint64_t seed = 0; seed < kMutatedCases; ++seed) {
    const PlanCase c = random_case(seed);
    const Plan plan = make_plan(c.task, c.options);
    for (size_t i = 0; i < plan.size(); ++i) {
      Plan mutated = plan;
      mutated.erase(mutated.begin() + i);
      ASSERT_FALSE(accepts(mutated, c.task)) << i << ' ' << to_string(plan[i]) << ' ' << describe(c);
    }
  }
}

// No action may come twice, whether at once or later.
TEST(CheckMutations, RefusesEveryPlanWithAnActionDoubled) {
  for (uint64_t seed = 0; seed < kMutatedCases; ++seed) {
    const PlanCase c = random_case(seed);
    const Plan plan = make_plan(c.task, c.options);
    for (size_t i = 0; i < plan.size(); ++i) {
      Plan mutated = plan;
      mutated.insert(mutated.begin() + i, plan[i]);
      ASSERT_FALSE(accepts(mutated, c.task)) << i << ' ' << to_string(plan[i]) << ' ' << describe(c);
      mutated = plan;
      mutated.push_back(plan[i]);
      ASSERT_FALSE(accepts(mutated, c.task)) << i << ' ' << to_string(plan[i]) << ' ' << describe(c);
    }
  }
}

// No field is free: another block, unit, micro-batch, half, kind or save is refused.
TEST(CheckMutations, RefusesEveryPlanWithAFieldChanged) {
  for (uint64_t seed = 0; seed < kMutatedCases / 4; ++seed) {
    const PlanCase c = random_case(seed);
    const Plan plan = make_plan(c.task, c.options);
    const auto blocks = static_cast<int32_t>(c.task.part.blocks.size());
    const auto units = static_cast<int32_t>(c.task.part.units.size());
    for (size_t i = 0; i < plan.size(); ++i) {
      std::vector<Action> others;
      const auto vary = [&](int32_t Action::*field, int32_t count) {
        if (plan[i].*field == kNoIndex) return;
        for (int32_t v = -1; v <= count; ++v) {
          others.push_back(plan[i]);
          others.back().*field = v;
        }
      };
      vary(&Action::block, blocks);
      vary(&Action::unit, units);
      vary(&Action::micro_batch, c.task.micro_batches);
      for (const Half half : {Half::kWhole, Half::kStart, Half::kWait}) {
        others.push_back(plan[i]);
        others.back().half = half;
        for (int k = 0; k < kKindCount; ++k) {
          others.push_back(plan[i]);
          others.back().half = half;
          others.back().kind = static_cast<Kind>(k);
        }
      }
      for (const Save save : {Save::kNothing, Save::kInput, Save::kAll}) {
        others.push_back(plan[i]);
        others.back().save = save;
      }
      for (const Action& other : others) {
        if (other == plan[i]) continue;
        Plan mutated = plan;
        mutated[i] = other;
        ASSERT_FALSE(accepts(mutated, c.task))
            << i << ' ' << to_string(plan[i]) << " -> " << to_string(other) << ' ' << describe(c);
      }
    }
  }
}

// What an action reads and writes, written down apart from the checker: two neighbours may change places if
// and only if they have nothing in common that one of them writes.
struct Effects {
  std::set<std::string> reads, writes;
};

Effects effects(const Action& a, const PlanTask& task) {
  Effects e;
  const auto at = [&](const char* what, int32_t b) {
    return std::string(what) + std::to_string(b) + "@" + std::to_string(a.micro_batch);
  };
  const auto blocks = static_cast<int32_t>(task.part.blocks.size());
  if (names_unit(a.kind))
    e.writes.insert((a.kind == Kind::kReduce ? "gradient" : "weights") + std::to_string(a.unit));
  if (names_block(a.kind)) e.writes.insert(at("saved", a.block));
  if (a.kind == Kind::kForward) {
    e.reads.insert(at("output", a.block - 1));
    e.writes.insert(at("output", a.block));
  }
  if (a.kind == Kind::kLoss) {
    e.reads.insert(at("output", blocks - 1));
    e.writes.insert(at("output gradient", blocks - 1));
  }
  if (a.kind == Kind::kBackward) {
    e.reads.insert(at("output gradient", a.block));
    e.writes.insert(at("output gradient", a.block - 1));
  }
  if (is_compute(a.kind)) {
    for (const int32_t u : task.part.blocks[a.block].units) {
      e.reads.insert("weights" + std::to_string(u));
      if ((a.kind == Kind::kBackward || adds_in_forward(a, task.part)) && task.part.units[u].trainable)
        e.reads.insert("gradient" + std::to_string(u));
    }
  }
  return e;
}

bool meet(const std::set<std::string>& a, const std::set<std::string>& b) {
  return std::any_of(a.begin(), a.end(), [&](const std::string& x) { return b.contains(x); });
}

bool may_change_places(const Action& a, const Action& b, const PlanTask& task) {
  const Effects x = effects(a, task), y = effects(b, task);
  return !meet(x.writes, y.writes) && !meet(x.writes, y.reads) && !meet(x.reads, y.writes);
}

// Harmless swaps are those of actions that share nothing: gathers of two units, a gather and work that does
// not use the unit, a reshard and the start of a reduction (weights and gradient are two buffers), transfers
// of two blocks. Two backwards that add to one gradient count as reads of it: sums are not checked for their
// order.
TEST(CheckMutations, RefusesNeighboursSwappedUnlessTheyShareNothing) {
  int harmless = 0, wrong = 0;
  for (uint64_t seed = 0; seed < 2 * kMutatedCases; ++seed) {
    const PlanCase c = random_case(seed);
    const Plan plan = make_plan(c.task, c.options);
    for (size_t i = 0; i + 1 < plan.size(); ++i) {
      Plan mutated = plan;
      std::swap(mutated[i], mutated[i + 1]);
      const bool allowed = may_change_places(plan[i], plan[i + 1], c.task);
      ++(allowed ? harmless : wrong);
      ASSERT_EQ(accepts(mutated, c.task), allowed)
          << i << ' ' << to_string(plan[i]) << " <-> " << to_string(plan[i + 1]) << ' ' << describe(c);
    }
  }
  EXPECT_GT(harmless, 1000);
  EXPECT_GT(wrong, 1000);
}

// --- Reasons, each by hand
// --------------------------------------------------------------------------------------

// Two blocks: the first droppable, a unit each.
PlanTask two_blocks(int32_t micro_batches = 1) {
  return {.part = ModelPart::whole({{{0}, true}, {{1}, false}}, {{true}, {true}}),
          .micro_batches = micro_batches};
}

const char* const kGather = "> unshard 0 | > unshard 1 | . unshard 0 | . unshard 1 |";
const char* const kGiveBack = "| > reduce 0 | > reduce 1 | . reduce 0 | . reduce 1 | reshard 0 | reshard 1";

std::string reason(const std::string& work, const PlanTask& task = two_blocks()) {
  return refusal(parse_plan(kGather + work + kGiveBack), task);
}

TEST(Check, AcceptsByHand) {
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep | loss | backward 1 | backward 0"), "accepted");
  EXPECT_EQ(reason("forward 0 drop | forward 1 keep | loss | backward 1 | recompute 0 | backward 0"),
            "accepted");
  EXPECT_EQ(reason("forward 0 drop | forward 1 keep | recompute 0 | loss | backward 1 | backward 0"),
            "accepted");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep | loss | backward_input 1 | backward_input 0 | "
                   "backward_weight 0 | "
                   "backward_weight 1"),
            "accepted");
  EXPECT_EQ(
      reason("forward 0 keep @0 | forward 0 keep @1 | forward 1 keep @1 | loss @1 | forward 1 keep @0 | "
             "backward 1 @1 | loss @0 | backward 1 @0 | backward 0 @0 | backward 0 @1",
             two_blocks(2)),
      "accepted");
}

TEST(Check, NamesIndexTextAndReasonOfWork) {
  EXPECT_EQ(reason("forward 1 keep"), "plan action 4 `forward 1 keep @0`: the block before has not run");
  EXPECT_EQ(reason("forward 0 keep | forward 0 keep"),
            "plan action 5 `forward 0 keep @0`: the block has run already");
  EXPECT_EQ(reason("forward 0"),
            "plan action 4 `forward 0 @0`: the backward needs what this forward must keep or drop");
  EXPECT_EQ(reason("forward 0 keep | forward 1 drop"),
            "plan action 5 `forward 1 drop @0`: the block must not be dropped");
  EXPECT_EQ(reason("forward 0 keep | loss"), "plan action 5 `loss @0`: the last block has not run");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep | loss | loss"),
            "plan action 7 `loss @0`: the loss has run already");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep | backward 1"),
            "plan action 6 `backward 1 @0`: the loss has not run");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep | loss | backward 0"),
            "plan action 7 `backward 0 @0`: the backward of the block after has not run");
  EXPECT_EQ(reason("forward 0 drop | forward 1 keep | loss | backward 1 | backward 0"),
            "plan action 8 `backward 0 @0`: the block was dropped and has not been recomputed");
  EXPECT_EQ(reason("forward 0 keep | recompute 0"), "plan action 5 `recompute 0 @0`: nothing was dropped");
  EXPECT_EQ(reason("recompute 0"), "plan action 4 `recompute 0 @0`: there is no input to recompute from");
  EXPECT_EQ(reason("forward 0 drop | recompute 0 | recompute 0"),
            "plan action 6 `recompute 0 @0`: the block is recomputed already");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep | loss | backward_weight 1"),
            "plan action 7 `backward_weight 1 @0`: backward_input has not run");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep | loss | backward_input 1 | backward 1"),
            "plan action 8 `backward 1 @0`: the backward has run already");
  EXPECT_EQ(reason("forward 2 keep"), "plan action 4 `forward 2 keep @0`: there is no such block");
  EXPECT_EQ(reason("forward 0 keep @1"), "plan action 4 `forward 0 keep @1`: there is no such micro-batch");
  EXPECT_EQ(reason("> unshard 2"), "plan action 4 `> unshard 2`: there is no such unit");
  EXPECT_EQ(reason("> send_output 1"),
            "plan action 4 `> send_output 1 @0`: no other stage has a part in this");
}

TEST(Check, NamesReasonsOfTransfers) {
  const PlanTask task = two_blocks();
  const auto of = [&](const char* text) { return refusal(parse_plan(text), task); };
  EXPECT_EQ(of("forward 0 keep"), "plan action 0 `forward 0 keep @0`: unit 0 is not gathered");
  EXPECT_EQ(of("> unshard 0 | forward 0 keep"),
            "plan action 1 `forward 0 keep @0`: unit 0 is still being gathered");
  EXPECT_EQ(of("> unshard 0 | > unshard 0"),
            "plan action 1 `> unshard 0`: the unit is being gathered already");
  EXPECT_EQ(of("> unshard 0 | . unshard 0 | > unshard 0"),
            "plan action 2 `> unshard 0`: the unit is gathered already");
  EXPECT_EQ(of(". unshard 0"), "plan action 0 `. unshard 0`: no gather of the unit has been started");
  EXPECT_EQ(of("reshard 0"), "plan action 0 `reshard 0`: the unit is not gathered");
  EXPECT_EQ(of("> unshard 0 | reshard 0"), "plan action 1 `reshard 0`: the unit is still being gathered");
  EXPECT_EQ(of("> unshard 0 | . unshard 0 | reshard 0"),
            "plan action 2 `reshard 0`: the unit was gathered and not used");
  EXPECT_EQ(of("> reduce 0"), "plan action 0 `> reduce 0`: there is no gradient to reduce");
  EXPECT_EQ(of(". reduce 0"), "plan action 0 `. reduce 0`: no reduction of the unit has been started");
  EXPECT_EQ(of("> offload 0"), "plan action 0 `> offload 0 @0`: nothing is saved");
  EXPECT_EQ(of(". offload 0"), "plan action 0 `. offload 0 @0`: no offload has been started");
  EXPECT_EQ(of("> onload 0"), "plan action 0 `> onload 0 @0`: it is not on the host");
  EXPECT_EQ(of(". onload 0"), "plan action 0 `. onload 0 @0`: no onload has been started");
  EXPECT_EQ(reason("forward 0 keep | > offload 0 | > offload 0"),
            "plan action 6 `> offload 0 @0`: it is on its way, or on the host, already");
  EXPECT_EQ(reason("forward 0 drop | > offload 0 | recompute 0"),
            "plan action 6 `recompute 0 @0`: the input is not on the device");
  EXPECT_EQ(
      reason("forward 0 keep | > offload 0 | . offload 0 | > onload 0 | forward 1 keep | loss | backward 1 | "
             "backward 0"),
      "plan action 11 `backward 0 @0`: what the forward saved is not on the device");
  EXPECT_EQ(
      reason("forward 0 keep | forward 1 keep | loss | backward_input 1 | > offload 1 | backward_weight 1"),
      "plan action 9 `backward_weight 1 @0`: what the forward saved is not on the device");
  EXPECT_EQ(reason("forward 0 keep @0 | forward 1 keep @0 | loss @0 | backward 1 @0 | > reduce 1 | forward 0 "
                   "keep @1 | "
                   "forward 1 keep @1 | loss @1 | backward 1 @1",
                   two_blocks(2)),
            "plan action 10 `forward 1 keep @1`: the gradient of unit 1 is being reduced");
  EXPECT_EQ(reason("forward 0 keep @0 | forward 1 keep @0 | loss @0 | forward 0 keep @1 | forward 1 keep @1 "
                   "| loss @1 |"
                   "backward 1 @0 | > reduce 1 | > reduce 1",
                   two_blocks(2)),
            "plan action 12 `> reduce 1`: the unit is being reduced already");
}

TEST(Check, NamesWhatIsLeftAtTheEnd) {
  const PlanTask task = two_blocks();
  const std::string work =
      std::string(kGather) + "forward 0 keep | forward 1 keep | loss | backward 1 | backward 0";
  const auto of = [&](const std::string& text) { return refusal(parse_plan(text), task); };
  EXPECT_EQ(of(""), "plan ends after 0 actions: block 0 @0 has not run forward");
  EXPECT_EQ(of(work), "plan ends after 9 actions with `backward 0 @0`: unit 0 is gathered");
  EXPECT_EQ(of(work + "| reshard 0 | reshard 1"),
            "plan ends after 11 actions with `reshard 1`: the gradient of unit 0 has not been reduced");
  EXPECT_EQ(of(work + "| reshard 0 | reshard 1 | > reduce 0"),
            "plan ends after 12 actions with `> reduce 0`: the reduction of unit 0 is in flight");
  EXPECT_EQ(of(work + "| reshard 0 | reshard 1 | > unshard 0"),
            "plan ends after 12 actions with `> unshard 0`: unit 0 is being gathered");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep"),
            "plan action 6 `> reduce 0`: there is no gradient to reduce");
  EXPECT_EQ(
      refusal(parse_plan("forward 0 keep | forward 1 keep"), task, {.gathered = false, .reduced = false}),
      "plan ends after 2 actions with `forward 1 keep @0`: block 0 @0 has not run backward");
  EXPECT_EQ(
      refusal(parse_plan("forward 0 keep | forward 1 keep | loss | backward_input 1 | backward_input 0"),
              task, {.gathered = false, .reduced = false}),
      "plan ends after 5 actions with `backward_input 0 @0`: block 0 @0 has not run backward_weight");
  const PlanTask scoring{.part = task.part, .forward_only = true};
  EXPECT_EQ(refusal(parse_plan("forward 0 | forward 1"), scoring, {.gathered = false}),
            "plan ends after 2 actions with `forward 1 @0`: no loss @0");
  EXPECT_EQ(refusal(parse_plan("forward 0 keep"), scoring, {.gathered = false}),
            "plan action 0 `forward 0 keep @0`: no backward follows, so there is nothing to keep or drop");
  EXPECT_EQ(refusal(parse_plan("forward 0 | forward 1 | loss | backward 1"), scoring, {.gathered = false}),
            "plan action 3 `backward 1 @0`: the block has no backward: nothing up to it is trainable, or no "
            "gradient is "
            "wanted");
}

TEST(Check, FrozenUnitsHaveNoGradient) {
  const PlanTask task{.part = ModelPart::whole({{{0, 1}, true}}, {{true}, {false}})};
  const std::string work = "forward 0 keep | loss | backward 0 | > reduce 0 |";
  EXPECT_EQ(refusal(parse_plan(kGather + work + "reshard 0 | reshard 1 | . reduce 0"), task), "accepted");
  EXPECT_EQ(refusal(parse_plan(kGather + work + "> reduce 1"), task),
            "plan action 8 `> reduce 1`: the unit has no gradient");
}

TEST(Check, RefusesFieldsThatDoNotBelongToTheKind) {
  const PlanTask task = two_blocks();
  EXPECT_EQ(refusal({Action::of_unit(Kind::kUnshard, Half::kWhole, 0)}, task),
            "plan action 0 `unshard 0`: this kind has a start and a wait, or it has neither");
  EXPECT_EQ(refusal({Action::of_block(Kind::kForward, 0, 0, Half::kStart)}, task),
            "plan action 0 `> forward 0 @0`: this kind has a start and a wait, or it has neither");
  Action loss = Action::loss(0);
  loss.save = Save::kAll;
  EXPECT_EQ(refusal({loss}, task), "plan action 0 `loss keep @0`: only a forward keeps or drops");
}

// --- Stages
// -----------------------------------------------------------------------------------------------------

// The middle stage of a pipeline: one block, no tokens, no loss.
PlanTask middle_stage(bool trainable_before = true) {
  PlanTask task{.part = ModelPart::whole({{{0}, true}}, {{true}})};
  task.part.stages[0].takes_tokens = false;
  task.part.stages[0].has_loss = false;
  task.part.stages[0].trainable_before = trainable_before;
  return task;
}

TEST(CheckStages, AMiddleStageReceivesAndSends) {
  const Plan plan = parse_plan(
      "> unshard 0 | . unshard 0 | > recv_input 0 | . recv_input 0 | forward 0 keep | > send_output 0 | "
      "> recv_output_grad 0 | . send_output 0 | . recv_output_grad 0 | backward 0 | > send_input_grad 0 | > "
      "reduce 0 | "
      ". reduce 0 | reshard 0 | . send_input_grad 0");
  EXPECT_EQ(refusal(plan, middle_stage()), "accepted");
  for (size_t i = 0; i < plan.size(); ++i) {
    Plan mutated = plan;
    mutated.erase(mutated.begin() + i);
    EXPECT_NE(refusal(mutated, middle_stage()), "accepted") << to_string(plan[i]);
    mutated = plan;
    mutated.insert(mutated.begin() + i, plan[i]);
    EXPECT_NE(refusal(mutated, middle_stage()), "accepted") << to_string(plan[i]);
  }
  EXPECT_EQ(refusal(plan, middle_stage(false)),
            "plan action 10 `> send_input_grad 0 @0`: no other stage has a part in this");
}

TEST(CheckStages, NamesReasons) {
  const auto of = [&](const char* text) {
    return refusal(parse_plan(text), middle_stage(), {.gathered = false});
  };
  EXPECT_EQ(of("forward 0 keep"), "plan action 0 `forward 0 keep @0`: the input has not been received");
  EXPECT_EQ(of("> send_output 0"), "plan action 0 `> send_output 0 @0`: the block has not run");
  EXPECT_EQ(of(". send_output 0"), "plan action 0 `. send_output 0 @0`: no such transfer is in flight");
  EXPECT_EQ(of("> send_input_grad 0"), "plan action 0 `> send_input_grad 0 @0`: the backward has not run");
  EXPECT_EQ(of("> recv_input 0 | > recv_input 0"),
            "plan action 1 `> recv_input 0 @0`: it has been started already");
  EXPECT_EQ(of("> recv_input 0 | . recv_input 0 | forward 0 keep | backward 0"),
            "plan action 3 `backward 0 @0`: the gradient of the output has not been received");
  EXPECT_EQ(of("loss"), "plan action 0 `loss @0`: the last stage is on another rank");
}

// One rank that holds the first and the last of three stages.
TEST(CheckStages, ARankMayHoldSeveral) {
  PlanTask task{.part = ModelPart::whole({{{0}, false}, {{1}, false}}, {{true}, {true}})};
  task.part.stages = {{0, 1, true, false, false}, {1, 1, false, true, true}};
  EXPECT_EQ(reason("forward 0 keep | > send_output 0 | . send_output 0 | > recv_input 1 | . recv_input 1 | "
                   "forward 1 keep | loss | backward 1 | > send_input_grad 1 | . send_input_grad 1 | "
                   "> recv_output_grad 0 | . recv_output_grad 0 | backward 0",
                   task),
            "accepted");
  EXPECT_EQ(reason("forward 0 keep | forward 1 keep", task),
            "plan action 5 `forward 1 keep @0`: the input has not been received");
}

}  // namespace
}  // namespace titanium
