#include "titanium/batch/pack.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "titanium/base/random.h"

namespace titanium {
namespace {

// ids encode the sample and the place in it.
Sample numbered(int64_t index, int64_t length) {
  Sample sample;
  sample.index = index;
  for (int64_t i = 0; i < length; ++i) sample.ids.push_back(static_cast<int32_t>(1000 * index + i));
  sample.loss_mask.assign(static_cast<size_t>(length), 1);
  return sample;
}

std::vector<WeighedSample> weighed(const std::vector<int64_t>& lengths) {
  std::vector<Sample> samples;
  for (size_t i = 0; i < lengths.size(); ++i) {
    samples.push_back(numbered(static_cast<int64_t>(i), lengths[i]));
  }
  const Counts counts = count(samples);
  return weigh_all(std::move(samples), Averaging::kTokenMean, counts);
}

TEST(Pack, ThreeDocumentsOfOnePack) {
  const auto samples = weighed({3, 1, 2});
  const WeighedSample* list[] = {&samples[0], &samples[1], &samples[2]};
  const PackedBatch batch = pack_one(list);
  EXPECT_EQ(batch.tokens, (std::vector<int64_t>{0, 1, 2, 1000, 2000, 2001}));
  EXPECT_EQ(batch.positions, (std::vector<int64_t>{0, 1, 2, 0, 0, 1}));
  EXPECT_EQ(batch.bounds, (std::vector<int64_t>{0, 3, 4, 6}));
  EXPECT_EQ(batch.labels, (std::vector<int64_t>{1, 2, kNoLabel, kNoLabel, 2001, kNoLabel}));
  const double w = 1.0 / 3;
  EXPECT_EQ(batch.weight, (std::vector<double>{w, w, 0, 0, w, 0}));
  EXPECT_EQ(batch.seq_weight, (std::vector<double>{0.5, 0, 0.5}));
  EXPECT_EQ(batch.sample, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_TRUE(batch.temperature.empty());
}

TEST(Pack, TemperatureIsPerToken) {
  auto samples = weighed({2, 1});
  samples[1].sample.temperature = 0.5;
  const WeighedSample* list[] = {&samples[0], &samples[1]};
  EXPECT_EQ(pack_one(list, 4).temperature, (std::vector<double>{1, 1, 0.5, 1}));
}

TEST(Pack, TheFillerWeighsNothing) {
  const auto samples = weighed({3, 2});
  const WeighedSample* list[] = {&samples[0], &samples[1]};
  const PackedBatch batch = pack_one(list, 8, 42);
  EXPECT_EQ(batch.size(), 8);
  EXPECT_EQ(batch.bounds, (std::vector<int64_t>{0, 3, 5, 8}));
  EXPECT_EQ(batch.sample.back(), kFiller);
  EXPECT_EQ(batch.seq_weight.back(), 0);
  for (size_t t = 5; t < 8; ++t) {
    EXPECT_EQ(batch.tokens[t], 42);
    EXPECT_EQ(batch.positions[t], static_cast<int64_t>(t - 5));
    EXPECT_EQ(batch.labels[t], kNoLabel);
    EXPECT_EQ(batch.weight[t], 0);
  }
  EXPECT_EQ(pack_one(list, 5).documents(), 2);
  const PackedBatch empty = pack_one({}, 1, 42);
  EXPECT_EQ(empty.tokens, (std::vector<int64_t>{42}));
  EXPECT_EQ(empty.sample, (std::vector<int64_t>{kFiller}));
  EXPECT_EQ(pack_one({}, 4).size(), 4);
}

// 16 samples of lengths that get reordered: outputs return in input order with input lengths, fillers gone.
TEST(Pack, OutputsReturnInInputOrder) {
  std::vector<int64_t> lengths, order;
  for (int64_t i = 0; i < 16; ++i) {
    lengths.push_back(1 + (i * 37) % 61);
    order.push_back(i);
  }
  const auto samples = weighed(lengths);
  PackOptions options;
  options.split.budget = 96;
  options.pad_to_multiple = 8;
  const auto batches = pack(samples, options);
  std::vector<int64_t> as_packed;
  std::vector<std::vector<int64_t>> outputs;
  for (const PackedBatch& batch : batches) {
    EXPECT_EQ(batch.size() % 8, 0);
    outputs.push_back(batch.tokens);
    for (int64_t s : batch.sample) {
      if (s != kFiller) as_packed.push_back(s);
    }
  }
  EXPECT_NE(as_packed, order);  // else the test shows nothing
  const auto rows = unpack<int64_t>(batches, outputs, order);
  ASSERT_EQ(rows.size(), 16u);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(rows[i], std::vector<int64_t>(samples[i].sample.ids.begin(), samples[i].sample.ids.end()));
  }
}

TEST(Pack, UnpackFindsWhatDoesNotFit) {
  const auto samples = weighed({2, 3});
  PackOptions options;
  options.split.budget = 8;
  const auto batches = pack(samples, options);
  const std::vector<std::vector<double>> good{std::vector<double>(5)}, bad{std::vector<double>(4)};
  const std::vector<int64_t> both{0, 1}, twice{0, 0}, foreign{0, 2};
  EXPECT_NO_THROW(unpack<double>(batches, good, both));
  EXPECT_THROW(unpack<double>(batches, bad, both), Bug);
  EXPECT_THROW(unpack<double>(batches, {}, both), Bug);
  EXPECT_THROW(unpack<double>(batches, good, twice), Bug);
  EXPECT_THROW(unpack<double>(batches, good, foreign), Bug);
}

TEST(Pack, OverlongSamplesAndBadArraysAreRefused) {
  PackOptions options;
  options.split.budget = 8;
  options.split.budget_key = "training.micro_batch_tokens";
  const auto message = [&](const std::vector<WeighedSample>& samples) -> std::string {
    try {
      pack(samples, options);
    } catch (const BadData& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(message(weighed({9})),
            "sequence 0 of the batch has 9 tokens, more than training.micro_batch_tokens = 8");
  auto odd = weighed({3});
  odd[0].weight.pop_back();
  EXPECT_NE(message(odd), "");
  for (double t : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    auto hot = weighed({3});
    hot[0].sample.temperature = t;
    EXPECT_NE(message(hot), "") << t;
  }
  EXPECT_NE(message({WeighedSample{}}), "");

  // The filler counts in the budget: 8 tokens in multiples of 3 leave 6.
  options.pad_to_multiple = 3;
  EXPECT_NE(message(weighed({7})), "");
  EXPECT_EQ(message(weighed({6, 2})), "");
  options.pad_to_multiple = 9;
  EXPECT_THROW(pack(weighed({1}), options), BadConfig);
  options.pad_to_multiple = 0;
  EXPECT_THROW(pack(weighed({1}), options), BadConfig);
}

TEST(Pack, GivenGroupsAreChecked) {
  const auto samples = weighed({4, 4});
  PackOptions options;
  options.split.budget = 4;
  EXPECT_EQ(pack(samples, Groups{{1}, {0}, {}}, options).size(), 3u);
  EXPECT_THROW(pack(samples, Groups{{0, 1}}, options), Bug);
  EXPECT_THROW(pack(samples, Groups{{0}}, options), Bug);
  EXPECT_THROW(pack(samples, Groups{{0}, {0}, {1}}, options), Bug);
  EXPECT_THROW(pack(samples, Groups{{0}, {2}}, options), Bug);
}

// Mixed lengths from 32 to 4096 tokens: what is computed is what was given, but for a filler.
TEST(Pack, LittleIsComputedForNothing) {
  const Random random(3, Purpose::kTest);
  std::vector<int64_t> lengths;
  int64_t real = 0;
  for (uint64_t i = 0; i < 64; ++i) {
    lengths.push_back(static_cast<int64_t>(32 * std::pow(128.0, random.uniform(i))));
    real += lengths.back();
  }
  PackOptions options;
  options.split.budget = 8192;
  options.pad_to_multiple = 16;
  int64_t computed = 0;
  for (const auto& batch : pack(weighed(lengths), options)) computed += batch.size();
  EXPECT_LE(static_cast<double>(computed), 1.1 * static_cast<double>(real));
}

// Every batch that pack makes: budget, padding, labels and positions that end with their document, each
// sample once, and weights that sum to what was given.
TEST(Pack, PropertiesOverRandomBatches) {
  const Random random(4, Purpose::kTest);
  uint64_t draw = 0;
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.below(draw++, static_cast<uint64_t>(bound)));
  };
  for (int trial = 0; trial < 3000; ++trial) {
    PackOptions options;
    options.split.budget = 1 + below(200);
    options.pad_to_multiple = 1 + below(std::min<int64_t>(options.split.budget, 9));
    options.split.divisor = 1 + below(3);
    options.split.allow_empty = true;
    options.split.packing = below(2) ? Packing::kBalanced : Packing::kBestFit;
    const int64_t usable = options.split.budget - options.split.budget % options.pad_to_multiple;
    std::vector<int64_t> lengths, order;
    for (int64_t n = below(30); n > 0; --n) {
      order.push_back(static_cast<int64_t>(lengths.size()));
      lengths.push_back(1 + below(usable));
    }
    const auto samples = weighed(lengths);
    const auto batches = pack(samples, options);
    ASSERT_EQ(static_cast<int64_t>(batches.size()) % options.split.divisor, 0);
    std::multiset<int64_t> seen;
    std::vector<std::vector<double>> weights;
    for (const PackedBatch& batch : batches) {
      ASSERT_GT(batch.size(), 0);
      ASSERT_LE(batch.size(), options.split.budget);
      ASSERT_EQ(batch.size() % options.pad_to_multiple, 0);
      ASSERT_EQ(batch.bounds.front(), 0);
      ASSERT_EQ(batch.bounds.back(), batch.size());
      ASSERT_EQ(batch.sample.size(), static_cast<size_t>(batch.documents()));
      for (int64_t d = 0; d < batch.documents(); ++d) {
        const int64_t begin = batch.bounds[static_cast<size_t>(d)];
        const int64_t end = batch.bounds[static_cast<size_t>(d) + 1];
        ASSERT_LT(begin, end);
        const bool filler = batch.sample[static_cast<size_t>(d)] == kFiller;
        if (!filler) seen.insert(batch.sample[static_cast<size_t>(d)]);
        for (int64_t t = begin; t < end; ++t) {
          const size_t i = static_cast<size_t>(t);
          ASSERT_EQ(batch.positions[i], t - begin);
          ASSERT_EQ(batch.labels[i], filler || t + 1 == end ? kNoLabel : batch.tokens[i + 1]);
          if (batch.labels[i] == kNoLabel) {
            ASSERT_EQ(batch.weight[i], 0);
          }
        }
      }
      weights.push_back(batch.weight);
    }
    ASSERT_EQ(seen, std::multiset<int64_t>(order.begin(), order.end()));
    const auto rows = unpack<double>(batches, weights, order);
    for (size_t i = 0; i < rows.size(); ++i) ASSERT_EQ(rows[i], samples[i].weight);
  }
}

// Entry i of a column belongs to ids[i], so it goes where ids[i] is the label.
TEST(Pack, ColumnsAreShiftedLikeTheMask) {
  auto samples = weighed({3, 1, 2});
  for (auto& w : samples) {
    w.sample.columns["id"].assign(w.sample.ids.begin(), w.sample.ids.end());
    w.sample.seq_columns["index"] = static_cast<double>(w.sample.index);
  }
  samples[2].sample.group = 7;
  const WeighedSample* list[] = {&samples[0], &samples[1], &samples[2]};
  const PackedBatch batch = pack_one(list, 8);
  EXPECT_EQ(batch.columns.at("id"), (std::vector<double>{1, 2, 0, 0, 2001, 0, 0, 0}));
  EXPECT_EQ(batch.seq_columns.at("index"), (std::vector<double>{0, 1, 2, 0}));
  EXPECT_EQ(batch.group, (std::vector<int64_t>{-1, -1, 7, -1}));
  EXPECT_EQ(batch.row_weight, (std::vector<double>{1.0 / 3, 1.0 / 3, 1.0 / 3, 0}));
  samples[1].sample.columns.clear();
  EXPECT_THROW(pack_one(list), BadData);
  samples[1].sample.columns["other"] = {1};
  EXPECT_THROW(pack_one(list), BadData);
  samples[1].sample.columns = {{"id", {1, 2}}};
  EXPECT_THROW(pack_one(list), BadData);
}

// Whether a loss finds a column must not depend on which samples are cut together.
TEST(Pack, AllMicroBatchesHaveTheSameColumns) {
  PackOptions options;
  options.split.budget = 10;
  for (const Groups& groups : {Groups{{0, 1}}, Groups{{0}, {1}}}) {
    auto samples = weighed({2, 3});
    samples[0].sample.columns["id"] = {1, 2};
    EXPECT_THROW(pack(samples, groups, options), BadData);
    samples[1].sample.columns["id"] = {1, 2, 3};
    EXPECT_EQ(pack(samples, groups, options).size(), groups.size());
    samples[1].sample.seq_columns["chosen"] = 1;
    EXPECT_THROW(pack(samples, groups, options), BadData);
  }
}

TEST(Pack, GroupsStayTogether) {
  const Random random(5, Purpose::kTest);
  uint64_t draw = 0;
  for (int trial = 0; trial < 300; ++trial) {
    std::vector<int64_t> lengths;
    for (int i = 0; i < 24; ++i) lengths.push_back(1 + static_cast<int64_t>(random.below(draw++, 16)));
    auto samples = weighed(lengths);
    for (size_t i = 0; i < samples.size(); ++i) {
      samples[i].sample.group = i < 20 ? static_cast<int64_t>(random.below(draw++, 7)) : -1;
    }
    PackOptions options;
    options.keep_groups = true;
    options.split.budget = 220;
    options.split.packing = trial % 2 ? Packing::kBalanced : Packing::kBestFit;
    std::map<int64_t, size_t> where;
    size_t seen = 0;
    const auto batches = pack(samples, options);
    for (size_t b = 0; b < batches.size(); ++b) {
      ASSERT_LE(batches[b].size(), 220);
      for (int64_t group : batches[b].group) {
        ++seen;
        if (group >= 0) {
          ASSERT_EQ(where.emplace(group, b).first->second, b);
        }
      }
    }
    ASSERT_EQ(seen, samples.size());
  }
}

TEST(Pack, AGroupThatDoesNotFitIsRefused) {
  auto samples = weighed({4, 3, 2});
  samples[0].sample.group = samples[2].sample.group = 9;
  PackOptions options;
  options.keep_groups = true;
  options.split.budget = 5;
  options.split.budget_key = "engine.max_token_len_per_gpu";
  try {
    pack(samples, options);
    ADD_FAILURE();
  } catch (const BadData& e) {
    EXPECT_STREQ(
        e.what(),
        "group 9 has 6 tokens in 2 samples, which stay together: more than engine.max_token_len_per_gpu = 5");
  }
  EXPECT_THROW(pack(samples, Groups{{0}, {1, 2}}, options), BadData);
  options.keep_groups = false;
  EXPECT_EQ(pack(samples, Groups{{0}, {1, 2}}, options).size(), 2u);
}

}  // namespace
}  // namespace titanium
