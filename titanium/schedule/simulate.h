// When every action of a plan starts and ends, from costs alone: a whole step of a cluster on paper.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "titanium/schedule/memory.h"

namespace titanium {

// Seconds, of one pipeline rank.  Bandwidth and latency are in them already.
struct PlanCosts {
  struct Block {
    double forward = 0, backward_input = 0, backward_weight = 0;  // a whole backward is both
    double transfer = 0;  // of the stream of one micro-batch, to the stage before or after
  };
  struct Unit {
    double unshard = 0, reduce = 0;  // in the channel; 0 where no other rank has a part
    double cast = 0, add = 0;  // of this rank's part, by its compute, before the one and after the other
  };
  std::vector<Block> blocks;  // [part.blocks]
  std::vector<Unit> units;    // [part.units]
  double loss = 0;
  double action = 0;    // what every action costs besides
  bool overlap = true;  // transfers go on beside compute; else the rank's compute waits for them (ranks whose
                        // transfers take the cores that they compute on)
  double update = 0;    // after the plan: norm, clip and optimizer
};

struct TimedAction {
  int64_t action = -1;  // in the plan; -1: the update
  double start = 0, end = 0;
  bool transfer = false;  // in a channel of its own, from when all that take part are there
};

struct Timeline {
  struct Rank {
    std::vector<TimedAction> actions;  // by start; a transfer once, as the action that waits for it
    double busy = 0;                   // seconds of compute
  };
  std::vector<Rank> ranks;  // [pipeline ranks]; the data and tensor-parallel ranks of one are alike
  double seconds = 0;       // of the step
  double bubble() const;    // share of the ranks' time that is neither compute nor update
};

// Plans of all pipeline ranks, which check_together has proved.  A channel (a unit's gathers, its reductions,
// a stage boundary's direction) has one transfer at a time, in order; a transfer between ranks begins when
// all of them have started it.  Bug when plans wait for each other.
Timeline simulate(const std::vector<Plan>& plans, const std::vector<PlanTask>& tasks,
                  const std::vector<PlanCosts>& costs);

}  // namespace titanium
