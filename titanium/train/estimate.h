// A step of a run on paper: plans, memory, traffic and, for a machine that is known, time.  Nothing is
// allocated, computed or sent.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "titanium/config/hardware.h"
#include "titanium/config/train_config.h"
#include "titanium/optim/optimizer.h"
#include "titanium/schedule/simulate.h"
#include "titanium/train/step.h"

namespace titanium {

struct RunMemory {
  int64_t masters = 0, optimizer = 0;                // bytes, for the whole run
  int64_t weights = 0, gradients = 0;                // bytes at the peak of the plan: cast weights, gradients
  int64_t activations = 0, recompute = 0, work = 0;  // bytes at the peak of the plan
  int64_t pooled = 0;  // buffers of units that serve none at the peak and are kept for the next use
  int64_t total() const {
    return masters + optimizer + weights + gradients + activations + recompute + work + pooled;
  }
  std::string text() const;  // one line
};

// What comes into a rank in one step from the ranks of each axis, in bytes.  A unit that tensor-parallel or
// pipeline ranks hold together counts as dp_shard.
struct AxisBytes {
  double dp_shard = 0, dp_replicate = 0, tp = 0, pp = 0;
  std::string text() const;
};

struct StepShape {
  int64_t tokens = 0;         // of a micro-batch
  int64_t document = 0;       // tokens of each document in it
  int32_t micro_batches = 1;  // of a data rank
};

struct StepEstimate {
  struct Rank {
    RunMemory memory;
    std::vector<MemoryUse> over_plan;  // what the plan itself holds while each action runs
    // Bytes that are held all the time: masters, optimizer, gradients, casts of whole units.
    int64_t always = 0;
    AxisBytes bytes;
  };
  std::vector<PlanTask> tasks;  // by pipeline rank, as the others
  std::vector<Plan> plans;
  std::vector<Rank> ranks;
};

// Of a training step with the loss formed by the head, for the pipeline ranks that have this rank's other
// coordinates.  Without what libtorch itself holds, about 0.2 GiB.
StepEstimate estimate_step(const TrainStep& step, const Optimizer& optimizer, const StepShape& shape);

// What the actions of each pipeline rank cost on a machine.
std::vector<PlanCosts> estimate_costs(const TrainStep& step, const Optimizer& optimizer,
                                      const StepEstimate& estimate, const StepShape& shape,
                                      const Hardware& hardware);

// What calibrate() divides by and estimate_costs() multiplies with.
inline constexpr double kHeadProducts = 3;  // of the head that forms the loss: logits, and both gradients
inline constexpr double kAttentionBackward = 2.5;  // in forwards: the scores again, and four gradients
// Bytes that norm, clip and update read and write for each weight of the part.
double update_bytes(const Optimizer& optimizer, const StoreDtypes& dtypes);

// The micro-batches of a data rank in a step of the config, where samples are as long as training.seq_len.
StepShape step_shape(const TrainingConfig& config, const ParallelDims& dims);

}  // namespace titanium
