#include "titanium/schedule/part.h"

#include <utility>

#include "titanium/base/error.h"

namespace titanium {

ModelPart ModelPart::whole(std::vector<PlanBlock> blocks, std::vector<PlanUnit> units) {
  ModelPart part;
  part.stages.push_back({.first_block = 0, .block_count = static_cast<int32_t>(blocks.size())});
  part.blocks = std::move(blocks);
  part.units = std::move(units);
  return part;
}

const PlanStage& ModelPart::stage_of(int32_t block) const {
  for (const PlanStage& stage : stages) {
    if (block < stage.first_block + stage.block_count) return stage;
  }
  throw Bug("plan: block {} is in no stage", block);
}

std::vector<bool> ModelPart::backward_blocks() const {
  std::vector<bool> result(blocks.size(), false);
  for (const PlanStage& stage : stages) {
    bool needed = stage.trainable_before;
    for (int32_t b = stage.first_block; b < stage.first_block + stage.block_count; ++b) {
      for (const int32_t unit : blocks[b].units) needed = needed || units[unit].trainable;
      result[b] = needed;
    }
  }
  return result;
}

bool adds_in_forward(const Action& action, const ModelPart& part) {
  return action.kind == Kind::kForward && action.save != Save::kNothing &&
         action.block + 1 == static_cast<int32_t>(part.blocks.size()) && part.stages.back().has_loss;
}

void validate(const PlanTask& task) {
  const auto& [blocks, units, stages] = task.part;
  if (task.micro_batches < 1) throw Bug("plan: {} micro-batches, at least 1 is needed", task.micro_batches);
  for (size_t b = 0; b < blocks.size(); ++b) {
    for (const int32_t unit : blocks[b].units) {
      if (unit < 0 || static_cast<size_t>(unit) >= units.size()) {
        throw Bug("plan: block {} names unit {}, there are {}", b, unit, units.size());
      }
    }
  }
  size_t covered = 0;
  for (const PlanStage& stage : stages) {
    if (stage.first_block < 0 || static_cast<size_t>(stage.first_block) != covered || stage.block_count < 1 ||
        static_cast<size_t>(stage.block_count) > blocks.size() - covered) {
      throw Bug("plan: a stage of {} blocks starts at block {}; {} of {} blocks are in stages so far",
                stage.block_count, stage.first_block, covered, blocks.size());
    }
    covered += static_cast<size_t>(stage.block_count);
  }
  if (task.order) {
    for (size_t s = 1; s < stages.size(); ++s) {
      if (stages[s].index <= stages[s - 1].index)
        throw Bug("plan: stage {} comes after stage {}", stages[s].index, stages[s - 1].index);
    }
    for (const PlanStage& stage : stages) {
      if (stage.index < 0 || stage.index >= task.order->stages() ||
          task.order->rank_of[stage.index] != task.rank)
        throw Bug("plan: stage {} is not one of rank {}", stage.index, task.rank);
    }
  }
  if (covered != blocks.size() || blocks.empty()) {
    throw Bug("plan: stages hold {} of {} blocks", covered, blocks.size());
  }
}

}  // namespace titanium
