#include "titanium/schedule/build.h"

#include "titanium/base/error.h"

namespace titanium {

Plan build(const PlanTask& task) {
  validate(task);
  const auto& stages = task.part.stages;
  if (stages.size() != 1 || !stages[0].takes_tokens || !stages[0].has_loss) {
    throw BadConfig("plan: this builder wants the whole model in one stage, {} stages given", stages.size());
  }
  const auto blocks = static_cast<int32_t>(task.part.blocks.size());
  const std::vector<bool> backward =
      task.forward_only ? std::vector<bool>(blocks, false) : task.part.backward_blocks();
  Plan plan;
  plan.reserve((2 * static_cast<size_t>(blocks) + 1) * static_cast<size_t>(task.micro_batches));
  for (int32_t m = 0; m < task.micro_batches; ++m) {
    for (int32_t b = 0; b < blocks; ++b) {
      plan.push_back(Action::forward(b, m, backward[b] ? Save::kAll : Save::kNothing));
    }
    plan.push_back(Action::loss(m));
    for (int32_t b = blocks - 1; b >= 0 && backward[b]; --b) {
      plan.push_back(Action::of_block(Kind::kBackward, b, m));
    }
  }
  return plan;
}

}  // namespace titanium
