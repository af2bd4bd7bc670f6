#include <gtest/gtest.h>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/schedule/action.h"
#include "titanium/schedule/print.h"

namespace titanium {
namespace {

Action random_action(const Random& random, uint64_t& counter, int32_t micro_batches) {
  const auto below = [&](uint64_t bound) { return static_cast<int32_t>(random.below(counter++, bound)); };
  Action action;
  action.kind = static_cast<Kind>(below(kKindCount));
  if (has_halves(action.kind)) action.half = below(2) ? Half::kStart : Half::kWait;
  if (action.kind == Kind::kForward) action.save = static_cast<Save>(below(3));
  if (names_unit(action.kind)) action.unit = below(300);
  if (names_block(action.kind)) action.block = below(3) ? below(300) : INT32_MAX;
  if (!names_unit(action.kind)) action.micro_batch = below(static_cast<uint64_t>(micro_batches));
  return action;
}

std::string refusal(std::string_view text) {
  try {
    parse_plan(text);
  } catch (const BadData& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Action, EveryKindHasItsText) {
  const Plan plan = {Action::of_unit(Kind::kUnshard, Half::kStart, 3),
                     Action::of_unit(Kind::kUnshard, Half::kWait, 3),
                     Action::of_unit(Kind::kReshard, Half::kWhole, 3),
                     Action::forward(1, 0, Save::kNothing),
                     Action::forward(1, 0, Save::kInput),
                     Action::forward(1, 0, Save::kAll),
                     Action::of_block(Kind::kRecompute, 1, 0),
                     Action::of_block(Kind::kBackward, 1, 0),
                     Action::of_block(Kind::kBackwardInput, 1, 0),
                     Action::of_block(Kind::kBackwardWeight, 1, 0),
                     Action::loss(0),
                     Action::of_unit(Kind::kReduce, Half::kStart, 3),
                     Action::of_unit(Kind::kReduce, Half::kWait, 3),
                     Action::of_block(Kind::kOffload, 1, 0, Half::kStart),
                     Action::of_block(Kind::kOnload, 1, 0, Half::kWait),
                     Action::of_block(Kind::kSendOutput, 1, 0, Half::kStart),
                     Action::of_block(Kind::kRecvInput, 1, 0, Half::kWait),
                     Action::of_block(Kind::kSendInputGrad, 1, 0, Half::kStart),
                     Action::of_block(Kind::kRecvOutputGrad, 1, 0, Half::kWait)};
  const std::vector<std::string> text = {"> unshard 3",         ". unshard 3",    "reshard 3",
                                         "forward 1",           "forward 1 drop", "forward 1 keep",
                                         "recompute 1",         "backward 1",     "backward_input 1",
                                         "backward_weight 1",   "loss",           "> reduce 3",
                                         ". reduce 3",          "> offload 1",    ". onload 1",
                                         "> send_output 1",     ". recv_input 1", "> send_input_grad 1",
                                         ". recv_output_grad 1"};
  ASSERT_EQ(plan.size(), text.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    EXPECT_EQ(print_plan({plan[i]}), text[i] + "\n");
    EXPECT_EQ(parse_plan(text[i]), Plan{plan[i]});
  }
}

TEST(Action, MicroBatchIsShownWhenThereIsMoreThanOne) {
  EXPECT_EQ(print_plan({Action::forward(3, 0, Save::kInput)}), "forward 3 drop\n");
  EXPECT_EQ(print_plan({Action::forward(3, 2, Save::kInput), Action::loss(0)}),
            "forward 3 drop @2\nloss @0\n");
  EXPECT_EQ(to_string(Action::forward(3, 0, Save::kInput)), "forward 3 drop @0");
}

TEST(Print, LinesFollowThePhasesAndWrap) {
  const Plan plan = parse_plan("forward 0 keep|loss|> unshard 0|backward 0|> reduce 0|reshard 0|. reduce 0");
  EXPECT_EQ(print_plan(plan),
            "forward 0 keep | loss\n"
            "> unshard 0 | backward 0 | > reduce 0 | reshard 0\n"
            ". reduce 0\n");
  EXPECT_EQ(print_plan(plan, 25),
            "forward 0 keep | loss\n"
            "> unshard 0 | backward 0\n"
            "  > reduce 0 | reshard 0\n"
            ". reduce 0\n");
  EXPECT_EQ(print_plan({}), "");
}

TEST(Print, ParsesToItself) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const Random random(seed, Purpose::kTest);
    uint64_t counter = 0;
    Plan plan(random.below(counter++, 40));
    const int32_t micro_batches = seed % 2 ? 1 : 5;
    for (Action& action : plan) action = random_action(random, counter, micro_batches);
    ASSERT_EQ(parse_plan(print_plan(plan)), plan) << print_plan(plan);
    ASSERT_EQ(parse_plan(print_plan(plan, static_cast<int>(seed % 50))), plan);
  }
}

TEST(Parse, TakesCommentsBlankLinesAndSpaces) {
  const Plan plan = parse_plan("# a plan | not read\n\n  forward 0 keep|\tloss @0 # the end\r\n\n");
  EXPECT_EQ(plan, (Plan{Action::forward(0, 0, Save::kAll), Action::loss(0)}));
  EXPECT_TRUE(parse_plan("").empty());
  EXPECT_TRUE(parse_plan("\n#\n  \n").empty());
}

TEST(Parse, RefusesWithLineAndItem) {
  EXPECT_EQ(refusal("loss\nforwards 0"), "plan, line 2: 'forwards 0': unknown action");
  EXPECT_EQ(refusal("unshard 0"), "plan, line 1: 'unshard 0': needs `>` (start) or `.` (wait)");
  EXPECT_EQ(refusal("> forward 0"), "plan, line 1: '> forward 0': has no start and no wait");
  EXPECT_EQ(refusal("forward"), "plan, line 1: 'forward': needs the number of a block or unit");
  EXPECT_EQ(refusal("forward x"), "plan, line 1: 'forward x': needs the number of a block or unit");
  EXPECT_EQ(refusal("forward 0 kept"), "plan, line 1: 'forward 0 kept': has a word too many");
  EXPECT_EQ(refusal("loss @"), "plan, line 1: 'loss @': needs the number of a micro-batch after @");
  EXPECT_EQ(refusal("loss 0"), "plan, line 1: 'loss 0': has a word too many");
  EXPECT_EQ(refusal("reshard 0 @1"), "plan, line 1: 'reshard 0 @1': has a word too many");
  EXPECT_EQ(refusal("\x01\xff 0"), "plan, line 1: '?? 0': unknown action");
  for (const char* text :
       {"loss | ", "| loss", "loss || loss", "|", ">", "forward -1", "forward +1", "forward 1.5",
        "forward 2147483648", "loss @-1", "backward 0 keep", "forward 0 @1 keep", "loss loss"}) {
    EXPECT_NE(refusal(text), "accepted") << text;
  }
  EXPECT_EQ(parse_plan("forward 2147483647")[0].block, INT32_MAX);
}

}  // namespace
}  // namespace titanium
