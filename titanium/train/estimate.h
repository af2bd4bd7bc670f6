// What a run will hold in memory, from counts alone.
#pragma once
#include <cstdint>
#include <string>

#include "titanium/optim/optimizer.h"
#include "titanium/train/step.h"

namespace titanium {

struct RunMemory {
  int64_t masters = 0, optimizer = 0;                // bytes, for the whole run
  int64_t weights = 0, gradients = 0;                // bytes at the peak of the plan: cast weights, gradients
  int64_t activations = 0, recompute = 0, work = 0;  // bytes at the peak of the plan
  int64_t total() const { return masters + optimizer + weights + gradients + activations + recompute + work; }
  std::string text() const;  // one line
};

// Of a training step with micro-batches of `tokens` tokens.  Without what libtorch itself holds, about 0.2
// GiB.
RunMemory estimate_memory(TrainStep& step, const Optimizer& optimizer, int64_t tokens);

}  // namespace titanium
