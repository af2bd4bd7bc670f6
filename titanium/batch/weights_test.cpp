#include "titanium/batch/weights.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/batch/pack.h"

namespace titanium {
namespace {

constexpr Averaging kModes[] = {Averaging::kTokenMean, Averaging::kSeqMeanTokenSum,
                                Averaging::kSeqMeanTokenMean, Averaging::kSeqMeanTokenSumNorm,
                                Averaging::kTokenSum};

// A sample whose predicting positions have the given mask: one token longer.
Sample predicting(const std::vector<uint8_t>& mask, int64_t index = 0) {
  Sample sample;
  sample.index = index;
  sample.ids.assign(mask.size() + 1, 3);
  sample.loss_mask.push_back(0);
  sample.loss_mask.insert(sample.loss_mask.end(), mask.begin(), mask.end());
  return sample;
}

double objective(std::span<const Sample> samples, const std::vector<std::vector<double>>& losses,
                 Averaging mode, const Counts& counts, double scale = 3) {
  double sum = 0;
  for (size_t s = 0; s < samples.size(); ++s) {
    const auto weight = weigh(samples[s], mode, counts, scale);
    for (size_t t = 0; t < losses[s].size(); ++t) sum += weight[t] * losses[s][t];
  }
  return sum;
}

// Token losses [4] and [1, 1, 1]: every mode by hand.  A wider mask (padding) changes nothing.
TEST(Weights, FourModesByHand) {
  for (size_t width : {size_t{3}, size_t{8}}) {
    std::vector<uint8_t> one{1}, three{1, 1, 1};
    std::vector<double> four{4}, ones{1, 1, 1};
    for (auto* mask : {&one, &three}) mask->resize(width, 0);
    for (auto* loss : {&four, &ones}) loss->resize(width, 100);
    const std::vector<Sample> samples{predicting(one), predicting(three)};
    const Counts counts = count(samples);
    EXPECT_EQ(counts, (Counts{4, 2, 0}));
    EXPECT_DOUBLE_EQ(objective(samples, {four, ones}, Averaging::kTokenMean, counts), 1.75);
    EXPECT_DOUBLE_EQ(objective(samples, {four, ones}, Averaging::kSeqMeanTokenSum, counts), 3.5);
    EXPECT_DOUBLE_EQ(objective(samples, {four, ones}, Averaging::kSeqMeanTokenMean, counts), 2.5);
    EXPECT_DOUBLE_EQ(objective(samples, {four, ones}, Averaging::kSeqMeanTokenSumNorm, counts, 3), 3.5 / 3);
  }
}

// Values of verl 0.9.1 (local counts, global counts, an explicit scale factor).
TEST(Weights, ReferenceAggregation) {
  int cases = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(TITANIUM_SOURCE_DIR "/tests/data/batch/agg_loss")) {
    const auto json = nlohmann::json::parse(std::ifstream(entry.path()));
    const auto& params = json["params"];
    const auto& mask = json["inputs"]["loss_mask"]["data"];
    const auto& loss = json["inputs"]["loss_mat"]["data"];
    const size_t rows = json["inputs"]["loss_mask"]["shape"][0];
    const size_t width = json["inputs"]["loss_mask"]["shape"][1];
    std::vector<Sample> samples;
    std::vector<std::vector<double>> losses;
    for (size_t r = 0; r < rows; ++r) {
      std::vector<uint8_t> m;
      std::vector<double> l;
      for (size_t t = 0; t < width; ++t) {
        m.push_back(mask[r * width + t].get<int>());
        l.push_back(loss[r * width + t].get<double>());
      }
      samples.push_back(predicting(m));
      losses.push_back(l);
    }
    const auto number = [&](const char* key, double otherwise) {
      return params.contains(key) && !params[key].is_null() ? params[key].get<double>() : otherwise;
    };
    Counts counts = count(samples);
    counts.tokens = static_cast<int64_t>(number("batch_num_tokens", static_cast<double>(counts.tokens)));
    counts.sequences =
        static_cast<int64_t>(number("global_batch_size", static_cast<double>(counts.sequences)));
    const double scale = number("loss_scale_factor", static_cast<double>(width));
    const Averaging mode = averaging_from(params["loss_agg_mode"].get<std::string>());
    const double want = json["expected_f64"]["loss"]["data"][0].get<double>() / number("dp_size", 1);
    EXPECT_NEAR(objective(samples, losses, mode, counts, scale), want, 1e-7 * std::abs(want)) << json["case"];
    const auto& slope = json["expected_f64"]["grad_loss_mat"]["data"];
    for (size_t r = 0; r < rows; ++r) {
      const auto weight = weigh(samples[r], mode, counts, scale);
      for (size_t t = 0; t < width; ++t) {
        EXPECT_NEAR(weight[t], slope[r * width + t].get<double>() / number("dp_size", 1), 1e-12);
      }
    }
    ++cases;
  }
  EXPECT_EQ(cases, 12);
}

// pad = eos = 2: the real final 2 of each sequence is trained, by mask and not by id; 2 + 1 terms.
TEST(Weights, FinalEosCountsAndTheFirstTokenHasNoPrediction) {
  const std::vector<Sample> samples{{.ids = {5, 6, 2}, .loss_mask = {1, 1, 1}},
                                    {.ids = {7, 2}, .loss_mask = {1, 1}}};
  EXPECT_EQ(count(samples), (Counts{3, 2, 0}));
  const auto weight = weigh(samples[0], Averaging::kTokenMean, count(samples));
  EXPECT_EQ(weight, (std::vector<double>{1.0 / 3, 1.0 / 3, 0}));
}

// Prompt of 3, response of 2: the terms are log p(r1 | p1..p3) at position 2 and log p(r2 | ..., r1) at
// position 3.
TEST(Weights, MaskIsShiftedToThePredictingPosition) {
  const Sample sample{.ids = {10, 11, 12, 20, 21}, .loss_mask = {0, 0, 0, 1, 1}};
  const auto weight = weigh(sample, Averaging::kSeqMeanTokenSum, count({&sample, 1}));
  EXPECT_EQ(weight, (std::vector<double>{0, 0, 1, 1, 0}));
}

TEST(Weights, SequencesWithoutTrainedTokensLeaveEveryMean) {
  const std::vector<Sample> with{predicting({1, 1}), predicting({0, 0, 0}), predicting({1})};
  const std::vector<Sample> without{with[0], with[2]};
  EXPECT_EQ(count(with), (Counts{3, 2, 1}));
  for (Averaging mode : kModes) {
    EXPECT_EQ(weigh(with[0], mode, count(with), 7), weigh(without[0], mode, count(without), 7));
    EXPECT_EQ(weigh(with[1], mode, count(with), 7), std::vector<double>(4, 0.0));
  }
  EXPECT_EQ(sequence_weight(with[0], count(with)), 0.5);
  EXPECT_EQ(sequence_weight(with[1], count(with)), 0);
}

TEST(Weights, AnAllMaskedBatchWeighsNothing) {
  std::vector<Sample> samples{predicting({0, 0}), {.ids = {4}, .loss_mask = {1}}};
  const Counts counts = count(samples);
  EXPECT_EQ(counts, (Counts{0, 0, 2}));
  for (Averaging mode : kModes) {
    for (const WeighedSample& w : weigh_all(samples, mode, counts, 2)) {
      EXPECT_EQ(w.weight, std::vector<double>(w.sample.ids.size(), 0.0));
      EXPECT_EQ(w.seq_weight, 0);
    }
  }
}

// The objective does not know how the global batch is cut: 8 sequences of 1..8 trained tokens, every equal
// and many ragged cuts into micro-batches and ranks whose counts are added; all modes.
TEST(Weights, NoCutChangesTheObjective) {
  std::vector<Sample> samples;
  std::vector<std::vector<double>> losses;
  const Random random(11, Purpose::kTest);
  for (int64_t n = 1; n <= 8; ++n) {
    samples.push_back(predicting(std::vector<uint8_t>(static_cast<size_t>(n), 1), n - 1));
    std::vector<double> loss;
    for (int64_t t = 0; t < n; ++t) loss.push_back(random.normal(static_cast<uint64_t>(100 * n + t)));
    losses.push_back(loss);
  }
  const double scale = 5;
  // By the definitions, with nothing cut.
  double token_mean = 0, token_sum = 0, seq_mean = 0;
  for (const auto& loss : losses) {
    const double sum = std::accumulate(loss.begin(), loss.end(), 0.0);
    token_mean += sum / 36;
    token_sum += sum / 8;
    seq_mean += sum / static_cast<double>(loss.size()) / 8;
  }
  const double want[] = {token_mean, token_sum, seq_mean, token_sum / scale, token_sum * 8};
  for (uint64_t trial = 0; trial < 500; ++trial) {
    const int64_t groups = trial < 4 ? int64_t{1} << trial : 1 + static_cast<int64_t>(random.below(trial, 8));
    std::vector<std::vector<Sample>> ranks(static_cast<size_t>(groups));
    for (size_t s = 0; s < 8; ++s) {
      const size_t g = trial < 4 ? s * static_cast<size_t>(groups) / 8
                                 : random.below(1000 + 8 * trial + s, static_cast<uint64_t>(groups));
      ranks[g].push_back(samples[s]);
    }
    Counts counts;
    for (const auto& rank : ranks) counts += count(rank);
    for (size_t m = 0; m < std::size(kModes); ++m) {
      double sum = 0;
      for (const auto& rank : ranks) {
        const auto weighed = weigh_all(rank, kModes[m], counts, scale);
        PackOptions options;
        options.split.budget = 9 + static_cast<int64_t>(random.below(9000 + trial, 30));
        options.pad_to_multiple = 1 + static_cast<int64_t>(trial % 3);
        options.split.budget += options.pad_to_multiple;
        options.split.allow_empty = true;
        for (const PackedBatch& batch : pack(weighed, options)) {
          for (int64_t d = 0; d < batch.documents(); ++d) {
            const int64_t sample = batch.sample[static_cast<size_t>(d)];
            const int64_t begin = batch.bounds[static_cast<size_t>(d)];
            for (int64_t t = begin; t < batch.bounds[static_cast<size_t>(d) + 1]; ++t) {
              const double w = batch.weight[static_cast<size_t>(t)];
              if (w != 0) sum += w * losses[static_cast<size_t>(sample)][static_cast<size_t>(t - begin)];
            }
          }
        }
      }
      ASSERT_NEAR(sum, want[m], 1e-12) << name(kModes[m]) << " in " << groups << " groups";
    }
  }
}

// 10 samples in batches of 4: the third has 2 and is weighed by its own counts, as if it ran alone.
TEST(Weights, AShortLastBatchHasItsOwnCounts) {
  const std::vector<Sample> last{predicting({1, 1, 1}), predicting({1})};
  const auto weighed = weigh_all(last, Averaging::kTokenMean, count(last));
  double sum = 0;
  for (const auto& w : weighed) sum += std::accumulate(w.weight.begin(), w.weight.end(), 0.0);
  EXPECT_DOUBLE_EQ(sum, 1);
}

TEST(Weights, ErrorsSayWhatIsAllowed) {
  EXPECT_THROW(averaging_from("token_mean"), BadConfig);
  for (Averaging mode : kModes) EXPECT_EQ(averaging_from(name(mode)), mode);
  const Sample sample = predicting({1});
  const Counts counts = count({&sample, 1});
  for (double scale : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(weigh(sample, Averaging::kSeqMeanTokenSumNorm, counts, scale), BadConfig);
    EXPECT_NO_THROW(weigh(sample, Averaging::kTokenMean, counts, scale));
  }
  EXPECT_THROW(weigh(sample, Averaging::kTokenMean, Counts{}), Bug);
  const Sample odd{.ids = {1, 2}, .loss_mask = {1}};
  EXPECT_THROW(count({&odd, 1}), BadData);
}

}  // namespace
}  // namespace titanium
