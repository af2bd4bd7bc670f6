// Which blocks of the model each pipeline stage has, and what that makes of the model on each rank.
#pragma once
#include <cstdint>
#include <vector>

#include "titanium/schedule/part.h"

namespace titanium {

// BadConfig for more stages than the model has blocks.
void check_stage_count(int64_t stages, int64_t blocks);

// First block of each stage: consecutive blocks, at least one a stage, so that the most expensive stage costs
// the least that is possible; of those the most even split (the least sum of squares), and of equal ones the
// one whose early stages have fewer.  BadConfig for more stages than blocks.
std::vector<int32_t> split_by_cost(const std::vector<double>& costs, int32_t stages);

// torchtitan's way: `layers` layers between an embedding and a head that count as `first_less` and
// `last_less` of them; early stages take what is left over.  BadConfig, with the keys, where a stage would be
// empty.
std::vector<int32_t> split_by_layers(int32_t layers, int32_t stages, int32_t first_less, int32_t last_less);

// Which stage starts where, and on which pipeline rank it is.
struct StagePlacing {
  std::vector<int32_t> first_blocks, rank_of_stage;
};

// The part of each pipeline rank: its stages' blocks and their units, both in the order of the whole model.
// `whole` is the model in one stage.
struct RankPart {
  ModelPart part;
  std::vector<int32_t> blocks, units;  // of the whole model
};
std::vector<RankPart> split_model(const ModelPart& whole, const std::vector<int32_t>& first_blocks,
                                  const std::vector<int32_t>& rank_of_stage);

}  // namespace titanium
