// What a plan has to know of a model and of the work: counts and who uses what.  No tensor, no size.
#pragma once
#include <cstdint>
#include <vector>

namespace titanium {

struct PlanBlock {
  std::vector<int32_t> units;  // usually one; a tied matrix is a unit of its own that two blocks name
  bool droppable = true;       // false for the embedding and the head: recompute and offload leave them alone
};

struct PlanUnit {
  bool trainable = true;  // false for frozen weights and fixed state: gathered, never reduced
};

// A stage of the pipeline: a run of this rank's blocks.  One rank may hold several.
struct PlanStage {
  int32_t first_block = 0;
  int32_t block_count = 0;
  bool takes_tokens = true;  // the first stage; others receive their input
  bool has_loss = true;      // the last stage; others send their output
  bool trainable_before =
      false;  // an earlier stage has trainable units, so this stage's input needs a gradient
};

// This rank's part of the model.  Blocks 0..B-1 are numbered through all its stages: the embedding first
// where the rank has it, then layers, then the head.
struct ModelPart {
  std::vector<PlanBlock> blocks;
  std::vector<PlanUnit> units;
  std::vector<PlanStage> stages;

  // The whole model in one stage.
  static ModelPart whole(std::vector<PlanBlock> blocks, std::vector<PlanUnit> units);

  // True when the block has a backward: it, or a block before it, has a trainable unit.  [blocks.size()]
  std::vector<bool> backward_blocks() const;
};

// One call of the executor: how many micro-batches, and whether gradients are wanted.
struct PlanTask {
  ModelPart part;
  int32_t micro_batches = 1;
  bool forward_only = false;
};

// Bug when an index is out of range, stages do not cover the blocks in order, or there is no micro-batch.
void validate(const PlanTask& task);

}  // namespace titanium
