#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "titanium/batch/packed_batch.h"
#include "titanium/batch/weights.h"
#include "titanium/config/train_config.h"
#include "titanium/dist/mesh.h"

namespace titanium {

// This rank's micro-batches of samples that every rank has, as many as every data rank gets; those left over
// hold a filler alone.  The samples may be a part of what they are weighed over: `all` counts the whole
// (design D4).  Every sample is in one micro-batch of one data rank, and the ranks of a tensor-parallel group
// get the same.
std::vector<PackedBatch> micro_batches(std::vector<Sample> samples, const TrainingConfig& config,
                                       const Counts& all, const Mesh& mesh);

// The same for samples that are weighed.
std::vector<PackedBatch> share_of_rank(const std::vector<WeighedSample>& samples,
                                       const TrainingConfig& config, const Mesh& mesh);
// With micro-batches of up to `budget` tokens, whose config key is `budget_key`.
std::vector<PackedBatch> share_of_rank(const std::vector<WeighedSample>& samples, int64_t budget,
                                       const std::string& budget_key, const Mesh& mesh);

}  // namespace titanium
