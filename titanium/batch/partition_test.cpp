#include "titanium/batch/partition.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "titanium/base/error.h"
#include "titanium/base/random.h"

namespace titanium {
namespace {

const nlohmann::json& fixture() {
  static const auto json =
      nlohmann::json::parse(std::ifstream(TITANIUM_SOURCE_DIR "/tests/data/batch/balance.json"));
  return json;
}

Groups sorted(Groups groups) {
  for (auto& group : groups) std::sort(group.begin(), group.end());
  std::sort(groups.begin(), groups.end());
  return groups;
}

double workload(const std::vector<int64_t>& group, const std::vector<int64_t>& lengths) {
  double sum = 0;
  for (int64_t i : group) sum += cost(lengths[static_cast<size_t>(i)]);
  return sum;
}

double largest(const Groups& groups, const std::vector<int64_t>& lengths) {
  double most = 0;
  for (const auto& group : groups) most = std::max(most, workload(group, lengths));
  return most;
}

// The properties that balance.json lists.
void expect_valid(const std::vector<Groups>& ranks, const std::vector<std::vector<int64_t>>& lengths,
                  const SplitOptions& options) {
  ASSERT_EQ(ranks.size(), lengths.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    ASSERT_EQ(ranks[r].size(), ranks[0].size());
    ASSERT_EQ(static_cast<int64_t>(ranks[r].size()) % options.divisor, 0);
    std::vector<int64_t> all;
    for (const auto& group : ranks[r]) {
      int64_t tokens = 0;
      for (int64_t i : group) tokens += lengths[r][static_cast<size_t>(i)];
      ASSERT_LE(tokens, options.budget);
      if (!options.allow_empty) {
        ASSERT_FALSE(group.empty());
      }
      ASSERT_TRUE(std::is_sorted(group.begin(), group.end()));
      all.insert(all.end(), group.begin(), group.end());
    }
    std::sort(all.begin(), all.end());
    std::vector<int64_t> every(lengths[r].size());
    std::iota(every.begin(), every.end(), 0);
    ASSERT_EQ(all, every);
  }
}

TEST(Partition, KarmarkarKarpFixtures) {
  for (const auto& c : fixture()["karmarkar_karp_cases"]) {
    const auto items = c["items"].get<std::vector<double>>();
    const auto groups = karmarkar_karp(items, c["k"].get<int64_t>());
    EXPECT_EQ(sorted(groups), sorted(c["partitions_sorted"].get<Groups>())) << c["case"];
  }
}

TEST(Partition, DataRankFixtures) {
  for (const auto& c : fixture()["dp_balance_cases"]) {
    const auto lengths = c["lengths"].get<std::vector<int64_t>>();
    const int64_t ranks = c["dp_size"];
    if (c.contains("expected_error")) {
      EXPECT_THROW(balance_ranks(lengths, ranks), BadData) << c["case"];
      continue;
    }
    const Groups groups = balance_ranks(lengths, ranks);
    EXPECT_EQ(sorted(groups), sorted(c["partitions_sorted"].get<Groups>())) << c["case"];
    const auto loads = c["workload_per_rank"].get<std::vector<double>>();
    EXPECT_EQ(largest(groups, lengths), *std::max_element(loads.begin(), loads.end())) << c["case"];
  }
}

TEST(Partition, MicroBatchFixtures) {
  for (const auto& c : fixture()["micro_batch_cases"]) {
    const auto lengths = c["lengths_per_rank"].get<std::vector<std::vector<int64_t>>>();
    for (Packing packing : {Packing::kBalanced, Packing::kBestFit}) {
      SplitOptions options;
      options.packing = packing;
      options.budget = c["max_tokens"];
      if (!c["num_batches_divided_by"].is_null()) options.divisor = c["num_batches_divided_by"];
      if (c.contains("expected_error")) {
        EXPECT_THROW(micro_batches(lengths, options), BadData) << c["case"];
        continue;
      }
      const auto ranks = micro_batches(lengths, options);
      expect_valid(ranks, lengths, options);
      const size_t count = c["num_micro_batches"];
      if (packing == Packing::kBestFit) {
        EXPECT_LE(ranks[0].size(), count) << c["case"];
        continue;
      }
      EXPECT_EQ(ranks[0].size(), count) << c["case"];
      for (size_t r = 0; r < ranks.size(); ++r) {
        EXPECT_LE(largest(ranks[r], lengths[r]), 1.10 * c["max_workload_per_rank"][r].get<double>())
            << c["case"];
      }
    }
  }
}

// ceil(sum / budget) is only a lower bound: eight sequences of 7 at a budget of 8 are 8 micro-batches.
TEST(Partition, NeverBeyondTheBudget) {
  SplitOptions options;
  options.budget = 8;
  for (Packing packing : {Packing::kBalanced, Packing::kBestFit}) {
    options.packing = packing;
    EXPECT_EQ(micro_batches(std::vector<int64_t>(8, 7), options).size(), 8u);
  }
}

TEST(Partition, AnOverlongSequenceIsNamedWithTheBudgetAndItsKey) {
  SplitOptions options;
  options.budget = 8;
  options.budget_key = "training.micro_batch_tokens";
  try {
    micro_batches(std::vector<int64_t>{3, 9}, options);
    FAIL();
  } catch (const BadData& e) {
    EXPECT_STREQ(e.what(), "sequence 1 of the batch has 9 tokens, more than training.micro_batch_tokens = 8");
  }
}

// Two ranks of very different load run the same number of micro-batches.
TEST(Partition, RanksAgreeOnTheCount) {
  const std::vector<std::vector<int64_t>> lengths{std::vector<int64_t>(8, 8), std::vector<int64_t>(8, 1)};
  SplitOptions options;
  options.budget = 16;
  const auto ranks = micro_batches(lengths, options);
  expect_valid(ranks, lengths, options);
  EXPECT_EQ(ranks[0].size(), 4u);
}

TEST(Partition, EmptyGroupsOnlyWhereAllowed) {
  const std::vector<std::vector<int64_t>> lengths{{10, 10}, {90, 92, 82, 81, 97}, {}};
  SplitOptions options;
  options.budget = 100;
  EXPECT_THROW(micro_batches(lengths, options), BadData);
  options.allow_empty = true;
  for (Packing packing : {Packing::kBalanced, Packing::kBestFit}) {
    options.packing = packing;
    const auto ranks = micro_batches(lengths, options);
    expect_valid(ranks, lengths, options);
    EXPECT_EQ(ranks[0].size(), 5u);
  }
  EXPECT_TRUE(micro_batches(std::vector<int64_t>{}, options).empty());
}

TEST(Partition, BadOptions) {
  const std::vector<int64_t> lengths{1};
  EXPECT_THROW(micro_batches(lengths, SplitOptions{}), BadConfig);
  SplitOptions options;
  options.budget = 8;
  options.divisor = 0;
  EXPECT_THROW(micro_batches(lengths, options), BadConfig);
  options.divisor = 1;
  EXPECT_THROW(micro_batches(std::vector<int64_t>{0}, options), BadData);
  EXPECT_THROW(karmarkar_karp(std::vector<double>{1}, 0), BadConfig);
}

TEST(Partition, EqualCountsWithARest) {
  const Random random(5, Purpose::kTest);
  for (uint64_t trial = 0; trial < 500; ++trial) {
    const int64_t n = 1 + static_cast<int64_t>(random.below(trial, 60));
    const int64_t k = 1 + static_cast<int64_t>(random.below(1000 + trial, static_cast<uint64_t>(n)));
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < n; ++i) {
      lengths.push_back(1 + static_cast<int64_t>(random.below(10000 + 100 * trial + i, 4000)));
    }
    const Groups groups = balance_ranks(lengths, k);
    std::vector<int64_t> all;
    for (const auto& group : groups) {
      ASSERT_GE(static_cast<int64_t>(group.size()), n / k);
      ASSERT_LE(static_cast<int64_t>(group.size()), (n + k - 1) / k);
      all.insert(all.end(), group.begin(), group.end());
    }
    std::sort(all.begin(), all.end());
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(all[static_cast<size_t>(i)], i);
  }
}

TEST(Partition, PropertiesOverRandomBatches) {
  const Random random(6, Purpose::kTest);
  uint64_t draw = 0;
  const auto below = [&](int64_t bound) {
    return static_cast<int64_t>(random.below(draw++, static_cast<uint64_t>(bound)));
  };
  for (int trial = 0; trial < 4000; ++trial) {
    SplitOptions options;
    options.budget = 1 + below(600);
    options.divisor = 1 + below(4);
    options.allow_empty = true;
    options.packing = trial % 2 ? Packing::kBalanced : Packing::kBestFit;
    std::vector<std::vector<int64_t>> lengths(static_cast<size_t>(1 + below(4)));
    int64_t total = 0;
    for (auto& rank : lengths) {
      const int64_t longest = 1 + below(options.budget);
      for (int64_t n = below(40); n > 0; --n) rank.push_back(1 + below(longest));
      total += static_cast<int64_t>(rank.size());
    }
    const auto ranks = micro_batches(lengths, options);
    expect_valid(ranks, lengths, options);
    if (HasFatalFailure()) return;
    ASSERT_EQ(ranks, micro_batches(lengths, options));
    ASSERT_EQ(ranks[0].empty(), total == 0);
  }
}

TEST(Deal, EveryRankGetsAsManyAndNeighboursInCost) {
  const std::vector<double> costs = {5, 1, 9, 3, 7, 2};
  EXPECT_EQ(deal(costs, 1), (Groups{{0, 1, 2, 3, 4, 5}}));  // one rank: the order stays
  EXPECT_EQ(deal(costs, 2), (Groups{{2, 3, 5}, {4, 0, 1}}));
  EXPECT_EQ(deal(costs, 3), (Groups{{2, 1}, {4, 5}, {0, 3}}));
  EXPECT_EQ(deal({}, 4), (Groups{{}, {}, {}, {}}));
  EXPECT_THROW(deal(costs, 4), Bug);
}

TEST(MicroBatches, NumbersAtTheEndOfTheirRange) {
  const std::vector<int64_t> lengths{3, 4, 5};
  SplitOptions options;
  options.budget = INT64_MAX;
  EXPECT_EQ(micro_batches(lengths, options), Groups({{0, 1, 2}}));
  options.budget = 8;
  options.divisor = INT64_MAX;
  EXPECT_THROW(micro_batches(lengths, options), BadData);
}

}  // namespace
}  // namespace titanium
