#pragma once
#include <vector>

#include "titanium/batch/packed_batch.h"
#include "titanium/batch/weights.h"
#include "titanium/config/train_config.h"

namespace titanium {

// Micro-batches of samples, which may be a part of what they are weighed over: `all` counts the whole (design
// D4).
std::vector<PackedBatch> micro_batches(std::vector<Sample> samples, const TrainingConfig& config,
                                       const Counts& all);

}  // namespace titanium
