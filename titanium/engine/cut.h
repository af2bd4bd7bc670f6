// The sequences of a call as micro-batches.
#pragma once
#include <string>
#include <vector>

#include "titanium/batch/pack.h"
#include "titanium/engine/batch.h"
#include "titanium/engine/engine_config.h"

namespace titanium {

// `micro`, or where it sets nothing what the config says for training or for forward alone.  BadConfig: more
// than one is set, or the config says nothing either.
MicroBatching resolve(const MicroBatching& micro, const EngineRunConfig& config, bool forward_only);

// Micro-batches of the samples, whose index is their place in the list.  keep_groups: samples of one group
// stay together.  BadData: a sample longer than the budget, or one that `given` lacks, names twice or that is
// not there; a number of samples that `sequences` does not divide; a cut through a group that must stay
// whole.
// At least `at_least` micro-batches where a token budget cuts, some of them fillers where there are fewer
// samples; their tokens are a multiple of the tensor-parallel size.
std::vector<PackedBatch> cut(const std::vector<WeighedSample>& samples, const MicroBatching& micro,
                             const EngineRunConfig& config, bool keep_groups, int64_t at_least = 1);

}  // namespace titanium
