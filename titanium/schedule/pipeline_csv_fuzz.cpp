// Any bytes are an order or are refused; an order that is taken ends, and makes plans that end together.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "titanium/base/error.h"
#include "titanium/schedule/plan.h"
#include "titanium/schedule/stages.h"

using namespace titanium;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const int32_t ranks = 1 + data[0] % 4, micro_batches = 1 + data[1] % 4;
  auto order = std::make_shared<PipelineOrder>();
  try {
    *order = read_pipeline_csv({reinterpret_cast<const char*>(data) + 2, size - 2}, "fuzz.csv", ranks,
                               micro_batches);
  } catch (const BadConfig&) {
    return 0;
  }
  if (static_cast<int32_t>(order->ranks.size()) != ranks || order->stages() < ranks) std::abort();
  if (order->stages() > 64) return 0;
  std::vector<PlanBlock> blocks(static_cast<size_t>(order->stages()));
  for (int32_t b = 0; b < order->stages(); ++b) blocks[b] = {{b}, b > 0 && b + 1 < order->stages()};
  std::vector<int32_t> first_blocks(blocks.size());
  std::iota(first_blocks.begin(), first_blocks.end(), 0);
  const ModelPart whole =
      ModelPart::whole(std::move(blocks), std::vector<PlanUnit>(first_blocks.size(), {true}));
  const std::vector<RankPart> parts = split_model(whole, first_blocks, order->rank_of);
  std::vector<PlanTask> tasks;
  for (int32_t rank = 0; rank < ranks; ++rank)
    tasks.push_back({parts[rank].part, micro_batches, false, order, rank});
  make_plans(tasks);  // a Bug here is one
  return 0;
}
