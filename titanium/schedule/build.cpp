#include "titanium/schedule/build.h"

#include <algorithm>

#include "titanium/base/error.h"

namespace titanium {
namespace {

std::vector<StageAction> accumulation(const PlanTask& task) {
  std::vector<StageAction> order;
  for (int32_t m = 0; m < task.micro_batches; ++m) {
    order.push_back({StageKind::kForward, task.part.stages[0].index, m});
    order.push_back({StageKind::kBackward, task.part.stages[0].index, m});
  }
  return order;
}

Kind block_kind(StageKind kind) {
  switch (kind) {
    case StageKind::kForward:
      return Kind::kForward;
    case StageKind::kBackward:
      return Kind::kBackward;
    case StageKind::kBackwardInput:
      return Kind::kBackwardInput;
    case StageKind::kBackwardWeight:
      return Kind::kBackwardWeight;
  }
  throw Bug("plan: {} is no kind of stage action", static_cast<int>(kind));
}

}  // namespace

Plan build(const PlanTask& task) {
  validate(task);
  const auto& stages = task.part.stages;
  if (!task.order && (stages.size() != 1 || !stages[0].takes_tokens || !stages[0].has_loss)) {
    throw BadConfig("plan: without a pipeline's order the whole model is one stage, {} stages given",
                    stages.size());
  }
  const std::vector<bool> backward =
      task.forward_only ? std::vector<bool>(task.part.blocks.size(), false) : task.part.backward_blocks();
  const std::vector<StageAction> order = task.order ? task.order->ranks.at(task.rank) : accumulation(task);
  Plan plan;
  plan.reserve((3 * task.part.blocks.size() + 1) * static_cast<size_t>(task.micro_batches));
  for (const StageAction& action : order) {
    const auto stage = std::find_if(stages.begin(), stages.end(),
                                    [&](const PlanStage& s) { return s.index == action.stage; });
    if (stage == stages.end()) throw Bug("plan: rank {} has no stage {}", task.rank, action.stage);
    const int32_t first = stage->first_block, end = first + stage->block_count;
    if (action.kind == StageKind::kForward) {
      for (int32_t b = first; b < end; ++b)
        plan.push_back(Action::forward(b, action.micro_batch, backward[b] ? Save::kAll : Save::kNothing));
      if (stage->has_loss) plan.push_back(Action::loss(action.micro_batch));
      continue;
    }
    for (int32_t b = end - 1; b >= first && backward[b]; --b) {
      StageKind kind = action.kind;
      if (stage->has_loss && b == end - 1) {  // the head, see build.h
        if (kind == StageKind::kBackwardWeight) continue;
        kind = StageKind::kBackward;
      }
      plan.push_back(Action::of_block(block_kind(kind), b, action.micro_batch));
    }
  }
  return plan;
}

}  // namespace titanium
