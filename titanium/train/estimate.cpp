#include "titanium/train/estimate.h"

#include <fmt/format.h>

#include "titanium/report/format.h"
#include "titanium/schedule/memory.h"

namespace titanium {

std::string RunMemory::text() const {
  const auto bytes = [](int64_t n) { return human_bytes(static_cast<uint64_t>(n)); };
  return fmt::format(
      "about {}: masters {}, optimizer {}, gradients {}, cast weights {}, activations {}, recompute {}, work "
      "{}",
      bytes(total()), bytes(masters), bytes(optimizer), bytes(gradients), bytes(weights), bytes(activations),
      bytes(recompute), bytes(work));
}

RunMemory estimate_memory(TrainStep& step, const Optimizer& optimizer, int64_t tokens) {
  const StoreDtypes& dtypes = step.store().dtypes();
  const auto element = static_cast<int64_t>(c10::elementSize(dtypes.compute));
  const int64_t stream = tokens / step.store().mesh().tp().size() * step.model().config.hidden_size * element;
  PlanBytes bytes;
  for (const int32_t block : step.part().blocks) {
    const Block::Bytes b = step.model().blocks[block]->bytes(tokens, element, step.options().keep_cheap);
    bytes.blocks.push_back(
        {.input = stream, .saved = b.saved, .forward_work = b.work, .backward_work = 2 * b.work});
  }
  RunMemory memory;
  for (const auto& unit : step.store().units()) {
    memory.masters += unit->shard().numel() * static_cast<int64_t>(c10::elementSize(dtypes.param));
    const int64_t gradient =
        unit->trainable() ? unit->numel() * static_cast<int64_t>(c10::elementSize(dtypes.reduce)) : 0;
    memory.gradients += gradient;  // kept between plans, to add to and to clip
    bytes.units.push_back({.weights = unit->bytes_gathered(), .gradient = 0});
  }
  // In one stage a second micro-batch adds nothing at the peak: the first one's activations are gone by then.
  // A pipeline is full with two for each of its stages.
  const auto micro_batches =
      step.options().pipeline ? 2 * static_cast<int32_t>(step.options().pipeline->stages.rank_of_stage.size())
                              : 1;
  const MemoryUse peak =
      simulate_memory(step.plan(micro_batches, false), step.task(micro_batches, false), bytes).at_peak;
  memory.optimizer = static_cast<int64_t>(optimizer.bytes_planned());
  memory.weights = peak.weights;
  memory.activations = peak.activations;
  memory.recompute = peak.recompute;
  memory.work = peak.work;
  return memory;
}

}  // namespace titanium
