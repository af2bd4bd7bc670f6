#include "titanium/train/micro_batches.h"

#include "titanium/batch/pack.h"

namespace titanium {

std::vector<PackedBatch> micro_batches(std::vector<Sample> samples, const TrainingConfig& config,
                                       const Counts& all, const Mesh& mesh) {
  return share_of_rank(
      weigh_all(std::move(samples), averaging_from(config.loss_agg_mode), all, config.loss_scale_factor),
      config, mesh);
}

std::vector<PackedBatch> share_of_rank(const std::vector<WeighedSample>& samples,
                                       const TrainingConfig& config, const Mesh& mesh) {
  PackOptions options;
  options.split.budget = config.max_tokens_per_microbatch;
  options.split.budget_key = "training.max_tokens_per_microbatch";
  options.pad_to_multiple = mesh.tp().size();
  const int64_t ranks = mesh.data().size();
  options.split.divisor = ranks;
  options.split.allow_empty = ranks > 1;
  std::vector<PackedBatch> all = pack(samples, options);
  std::vector<double> costs;
  for (const PackedBatch& batch : all) {
    double sum = 0;
    for (int64_t d = 0; d < batch.documents(); ++d) sum += cost(batch.bounds[d + 1] - batch.bounds[d]);
    costs.push_back(sum);
  }
  std::vector<PackedBatch> own;
  const Groups dealt = deal(costs, ranks);
  for (const int64_t i : dealt.at(mesh.data().rank())) own.push_back(std::move(all[i]));
  return own;
}

}  // namespace titanium
