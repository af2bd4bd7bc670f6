#include "titanium/train/score.h"

#include <ATen/ATen.h>

#include <numeric>

#include "titanium/batch/pack.h"

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
  PackOptions options;
  options.split.budget = max_tokens;
  options.split.budget_key = max_tokens_key;
  const std::vector<PackedBatch> batches = pack(weighed, options);
  const std::vector<TokenStats> stats = step.score(batches, {.entropy = true}, HeadRows::kLabelled);

  std::vector<std::vector<double>> logprob, entropy;
  const auto values = [](const at::Tensor& t) {
    const at::Tensor d = t.to(at::kDouble).contiguous();
    return std::vector<double>(d.data_ptr<double>(), d.data_ptr<double>() + d.numel());
  };
  for (const TokenStats& s : stats) {
    logprob.push_back(values(s.logprob));
    entropy.push_back(values(s.entropy));
  }
  std::vector<int64_t> order(samples.size());
  std::iota(order.begin(), order.end(), 0);
  auto logprob_rows = unpack<double>(batches, logprob, order),
       entropy_rows = unpack<double>(batches, entropy, order);
  // The head's entry t is about token t + 1.
  const auto shift = [](std::vector<double>& row) {
    row.insert(row.begin(), 0.0);
    row.pop_back();
  };
  std::vector<TokenScores> scores;
  for (size_t i = 0; i < samples.size(); ++i) {
    shift(logprob_rows[i]);
    shift(entropy_rows[i]);
    scores.push_back({std::move(logprob_rows[i]), std::move(entropy_rows[i])});
  }
  return scores;
}

}  // namespace titanium
