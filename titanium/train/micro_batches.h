#pragma once
#include <vector>

#include "titanium/batch/packed_batch.h"
#include "titanium/batch/weights.h"
#include "titanium/config/train_config.h"

namespace titanium {

// Micro-batches of a step's samples: weighed over the whole global batch, then cut (design D4).
std::vector<PackedBatch> micro_batches(std::vector<Sample> samples, const TrainingConfig& config,
                                       Counts* counts = nullptr);

}  // namespace titanium
