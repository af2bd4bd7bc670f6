#include "titanium/schedule/passes/runs.h"

namespace titanium {

std::vector<BlockRun> block_runs(const Plan& plan) {
  std::vector<BlockRun> result;
  bool open = false;
  for (size_t i = 0; i < plan.size(); ++i) {
    const Action& action = plan[i];
    if (action.kind == Kind::kLoss) open = false;
    if (!uses_weights(action.kind)) continue;
    if (open && result.back().block == action.block && result.back().micro_batch == action.micro_batch) {
      result.back().last = i;
    } else {
      result.push_back({i, i, action.block, action.micro_batch});
      open = true;
    }
  }
  return result;
}

std::vector<bool> every_nth(const ModelPart& part, int32_t n) {
  std::vector<bool> chosen(part.blocks.size(), false);
  int32_t count = 0;
  for (size_t b = 0; b < part.blocks.size(); ++b) {
    if (part.blocks[b].droppable) chosen[b] = n > 0 && ++count % n == 0;
  }
  return chosen;
}

}  // namespace titanium
