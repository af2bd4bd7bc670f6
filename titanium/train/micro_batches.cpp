#include "titanium/train/micro_batches.h"

#include "titanium/batch/pack.h"

namespace titanium {

std::vector<PackedBatch> micro_batches(std::vector<Sample> samples, const TrainingConfig& config,
                                       const Counts& all) {
  const auto weighed =
      weigh_all(std::move(samples), averaging_from(config.loss_agg_mode), all, config.loss_scale_factor);
  PackOptions options;
  options.split.budget = config.max_tokens_per_microbatch;
  options.split.budget_key = "training.max_tokens_per_microbatch";
  return pack(weighed, options);
}

}  // namespace titanium
