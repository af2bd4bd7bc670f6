// What a plan has to know of a model and of the work: counts and who uses what.  No tensor, no size.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "titanium/schedule/action.h"
#include "titanium/schedule/pipeline.h"

namespace titanium {

struct PlanBlock {
  std::vector<int32_t> units;  // usually one; a tied matrix is a unit of its own that two blocks name
  bool droppable = true;       // false for the embedding and the head: recompute and offload leave them alone
};

struct PlanUnit {
  bool trainable = true;  // false for frozen weights and fixed state: gathered, never reduced
  // Blocks of another pipeline rank use it too (a tied matrix), under the same number: it is gathered at the
  // start of a plan and reduced at its end, so that no stage waits for another in between.
  int32_t spans = -1;
};

// A stage of the pipeline: a run of this rank's blocks.  One rank may hold several, ascending.
struct PlanStage {
  int32_t first_block = 0;
  int32_t block_count = 0;
  bool takes_tokens = true;  // the first stage; others receive their input
  bool has_loss = true;      // the last stage; others send their output
  bool trainable_before =
      false;  // an earlier stage has trainable units, so this stage's input needs a gradient
  // The stage before, or after it, is on this rank too, in the blocks next to its own: nothing is sent.
  bool input_here = false, output_here = false;
  int32_t index = 0;  // in the pipeline

  bool receives() const { return !takes_tokens && !input_here; }
  bool sends() const { return !has_loss && !output_here; }
};

// This rank's part of the model.  Blocks 0..B-1 are numbered through all its stages: the embedding first
// where the rank has it, then layers, then the head.
struct ModelPart {
  std::vector<PlanBlock> blocks;
  std::vector<PlanUnit> units;
  std::vector<PlanStage> stages;

  // The whole model in one stage.
  static ModelPart whole(std::vector<PlanBlock> blocks, std::vector<PlanUnit> units);

  const PlanStage& stage_of(int32_t block) const;

  // True when the block has a backward: it, or a block before it, has a trainable unit.  [blocks.size()]
  std::vector<bool> backward_blocks() const;
};

// One call of the executor: how many micro-batches, and whether gradients are wanted.
struct PlanTask {
  ModelPart part;
  int32_t micro_batches = 1;
  bool forward_only = false;
  // What the pipeline ranks run, and which of them this one is.  Null: one stage, gradient accumulation.
  std::shared_ptr<const PipelineOrder> order = nullptr;
  int32_t rank = 0;
};

// The head's forward adds to the gradient of its weights where it forms the loss itself.
bool adds_in_forward(const Action& action, const ModelPart& part);

// Bug when an index is out of range, stages do not cover the blocks in order or are not those of the order,
// or there is no micro-batch.
void validate(const PlanTask& task);

}  // namespace titanium
