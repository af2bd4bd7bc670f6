// How much memory a plan holds, action by action, from byte counts: an estimate before anything is allocated.
// Of a plan that has run before: buffers of units come from a pool that keeps them, by size.
#pragma once
#include <cstdint>
#include <vector>

#include "titanium/schedule/action.h"
#include "titanium/schedule/part.h"

namespace titanium {

// Bytes for one micro-batch; for micro-batches of several sizes give the largest.
struct BlockBytes {
  int64_t input = 0;  // the block's input, all that is left of a dropped block
  int64_t saved = 0;  // what a `keep` leaves, its input included
  int64_t forward_work =
      0;  // most that a forward that saves nothing holds at once; also a `keep` may hold it on top
  int64_t backward_work = 0;  // most that a backward holds at once beyond what was saved
};

struct UnitBytes {
  int64_t weights = 0;   // the gathered buffer; 0 when the compute view is the master itself
  int64_t gradient = 0;  // the gradient buffer, from the first backward until its reduction has ended
};

struct PlanBytes {
  std::vector<BlockBytes> blocks;  // [part.blocks]
  std::vector<UnitBytes> units;    // [part.units]
};

struct MemoryUse {
  int64_t weights = 0;      // gathered units
  int64_t gradients = 0;    // gradient buffers
  int64_t activations = 0;  // what forwards saved
  int64_t recompute = 0;    // what recomputes brought back
  int64_t work = 0;         // of the action that runs
  int64_t pooled = 0;       // buffers of units that serve none now
  int64_t total() const { return weights + gradients + activations + recompute + work + pooled; }
};

struct MemoryEstimate {
  MemoryUse peak;       // each kind at its own highest
  MemoryUse at_peak;    // all kinds at the action where the total is highest
  int64_t action = -1;  // that action's index; -1 for an empty plan
  int64_t host = 0;     // highest number of bytes offloaded
};

// The plan has passed check().  `over_plan`, if given: what is held while each action runs.  Bug when the
// byte counts do not fit the task.
MemoryEstimate simulate_memory(const Plan& plan, const PlanTask& task, const PlanBytes& bytes,
                               std::vector<MemoryUse>* over_plan = nullptr);

}  // namespace titanium
