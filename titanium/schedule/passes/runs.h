// The grain at which transfers overlap with work.
#pragma once
#include <cstdint>
#include <vector>

#include "titanium/schedule/action.h"
#include "titanium/schedule/part.h"

namespace titanium {

// A run of actions that use the weights of one block for one micro-batch, such as `recompute 1 | backward 1`.
// A loss, or work on another block, ends it.  `first` and `last` are indices of the plan.
struct BlockRun {
  size_t first, last;
  int32_t block, micro_batch;
};
std::vector<BlockRun> block_runs(const Plan& plan);

// The droppable blocks, counted from 1, whose count n divides; none for n = 0.  [part.blocks]
std::vector<bool> every_nth(const ModelPart& part, int32_t n);

}  // namespace titanium
