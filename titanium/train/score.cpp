#include "titanium/train/score.h"

#include <ATen/ATen.h>

#include "titanium/batch/pack.h"
#include "titanium/train/micro_batches.h"

namespace titanium {

std::vector<TokenScores> score_samples(TrainStep& step, const std::vector<Sample>& samples,
                                       int64_t max_tokens, const std::string& max_tokens_key) {
  std::vector<WeighedSample> weighed;
  for (size_t i = 0; i < samples.size(); ++i) {
    Sample sample = samples[i];
    sample.index = static_cast<int64_t>(i);
    std::vector<double> none(sample.ids.size(), 0.0);
    weighed.push_back({std::move(sample), std::move(none), 0});
  }
  std::vector<int64_t> begins{0};  // of each sample, in a row of them all
  for (const Sample& sample : samples) begins.push_back(begins.back() + sample.size());
  const Mesh& mesh = step.store().mesh();
  const std::vector<PackedBatch> batches = share_of_rank(weighed, max_tokens, max_tokens_key, mesh);
  const std::vector<TokenStats> stats = step.score(batches, {.entropy = true}, HeadRows::kLabelled);

  const at::Tensor all = at::zeros({2, begins.back()}, at::kDouble);
  for (size_t b = 0; b < batches.size(); ++b) {
    const PackedBatch& batch = batches[b];
    for (int64_t d = 0; d < batch.documents(); ++d) {
      const auto i = static_cast<size_t>(d);
      if (batch.sample[i] == kFiller) continue;
      // The head's entry t is about token t + 1; the last one is about nothing.
      const int64_t to = begins[static_cast<size_t>(batch.sample[i])] + 1, from = batch.bounds[i],
                    count = batch.bounds[i + 1] - from - 1;
      all[0].narrow(0, to, count).copy_(stats[b].logprob.narrow(0, from, count));
      all[1].narrow(0, to, count).copy_(stats[b].entropy.narrow(0, from, count));
    }
  }
  mesh.data().all_reduce(all);  // every other rank has 0 there
  std::vector<TokenScores> scores;
  const auto* logprob = all.const_data_ptr<double>();
  const double* entropy = logprob + begins.back();
  for (size_t i = 0; i < samples.size(); ++i)
    scores.push_back(
        {{logprob + begins[i], logprob + begins[i + 1]}, {entropy + begins[i], entropy + begins[i + 1]}});
  return scores;
}

}  // namespace titanium
