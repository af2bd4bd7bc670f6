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
  return share_of_rank(samples, config.max_tokens_per_microbatch, "training.max_tokens_per_microbatch", mesh);
}

std::vector<PackedBatch> share_of_rank(const std::vector<WeighedSample>& samples, int64_t budget,
                                       const std::string& budget_key, const Mesh& mesh) {
  PackOptions options;
  options.split.budget = budget;
  options.split.budget_key = budget_key;
  options.pad_to_multiple = mesh.tp().size();
  const int64_t ranks = mesh.data().size();
  options.split.divisor = ranks;
  options.split.allow_empty = ranks > 1;
  // All ranks cut all samples, by their lengths alone, and each lays out its own.
  const Groups groups = groups_of(samples, options);
  std::vector<double> costs;
  for (const auto& group : groups) {
    double sum = 0;
    for (const int64_t i : group) sum += cost(samples[i].sample.size());
    costs.push_back(sum);
  }
  std::vector<PackedBatch> own;
  const Groups dealt = deal(costs, ranks);
  for (const int64_t g : dealt.at(mesh.data().rank())) {
    std::vector<const WeighedSample*> members;
    for (const int64_t i : groups[g]) members.push_back(&samples[i]);
    own.push_back(pack_one(members, options.pad_to_multiple));
  }
  return own;
}

}  // namespace titanium
