#include "titanium/schedule/passes/passes.h"
#include "titanium/schedule/passes/runs.h"

namespace titanium {

Plan add_recompute(const Plan& plan, const PlanTask& task, const PlanOptions& options) {
  if (options.recompute == Recompute::kNone) return plan;
  const int32_t n = options.recompute == Recompute::kFull ? 1 : options.recompute_every;
  const std::vector<bool> chosen = every_nth(task.part, n);
  Plan out;
  out.reserve(plan.size() * 3 / 2);
  for (Action action : plan) {
    const bool first_backward = action.kind == Kind::kBackward || action.kind == Kind::kBackwardInput;
    if (first_backward && chosen[action.block]) {
      out.push_back(Action::of_block(Kind::kRecompute, action.block, action.micro_batch));
    }
    if (action.save == Save::kAll && chosen[action.block]) action.save = Save::kInput;
    out.push_back(action);
  }
  return out;
}

}  // namespace titanium
