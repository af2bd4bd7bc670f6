// A token's log-prob is the same whatever micro-batch it is in: what on-policy training rests on.
#include <gtest/gtest.h>

#include <cmath>

#include "titanium/train/score.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

std::vector<Sample> samples_of_many_lengths() {
  std::vector<Sample> samples;
  for (int64_t n : {5, 64, 17, 130, 33, 8}) {
    Sample sample;
    for (int64_t t = 0; t < n; ++t)
      sample.ids.push_back(static_cast<int32_t>((t * t * 7 + 13 * n + t) % 320));
    sample.loss_mask.assign(sample.ids.size(), 1);
    samples.push_back(std::move(sample));
  }
  return samples;
}

double largest_difference(const std::vector<TokenScores>& a, const std::vector<TokenScores>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (size_t t = 0; t < a[i].logprob.size(); ++t) {
      largest = std::max(largest, std::abs(a[i].logprob[t] - b[i].logprob[t]));
      largest = std::max(largest, std::abs(a[i].entropy[t] - b[i].entropy[t]));
    }
  }
  return largest;
}

class Packing : public testing::TestWithParam<const char*> {};

TEST_P(Packing, ScoresDoNotDependOnTheMicroBatch) {
  const std::string dtype = GetParam();
  const TrainConfig config = load_train_config(std::nullopt, {"training.mixed_precision_param=" + dtype});
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  const Session session =
      open_session(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/models/qwen3", config, log);
  const auto samples = samples_of_many_lengths();
  const auto together = score_samples(*session.step, samples, 1000, "budget");
  const auto split = score_samples(*session.step, samples, 130, "budget");
  std::vector<TokenScores> alone;
  for (const Sample& sample : samples)
    alone.push_back(score_samples(*session.step, {sample}, 1000, "budget")[0]);
  // In bf16 every kernel is ours and keeps the order of every sum; in fp32 products are MKL's.
  const double allowed = dtype == "bfloat16" ? 0 : 1e-5;
  EXPECT_LE(largest_difference(together, split), allowed);
  EXPECT_LE(largest_difference(together, alone), allowed);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Packing, testing::Values("bfloat16", "float32"));

}  // namespace
}  // namespace titanium
