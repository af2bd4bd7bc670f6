#include "titanium/ops/allocator.h"

#include <gtest/gtest.h>

#include <vector>

namespace titanium {
namespace {

constexpr int64_t kMiB = 1 << 20;

struct Blocks : testing::Test {
  Blocks() { release_free_blocks(); }
  static c10::DataPtr take(int64_t bytes) { return block_allocator().allocate(bytes); }
};

TEST_F(Blocks, OneServesTheNextTensorOfAboutItsSize) {
  c10::DataPtr first = take(8 * kMiB);
  const void* place = first.get();
  EXPECT_EQ(block_use().used, 8 * kMiB);
  first.clear();
  EXPECT_EQ(block_use().used, 0);
  EXPECT_EQ(block_use().free, 8 * kMiB);
  EXPECT_NE(take(9 * kMiB).get(), place);  // too small
  EXPECT_NE(take(7 * kMiB).get(), place);  // more than an eighth would be wasted
  const c10::DataPtr second = take(8 * kMiB - 1);
  EXPECT_EQ(second.get(), place);
}

TEST_F(Blocks, SmallTensorsAreNotBlocks) {
  const c10::DataPtr small = take(kLeastBlock - 1);
  EXPECT_EQ(block_use().used, 0);
  const c10::DataPtr none = take(0);
  EXPECT_EQ(block_use().used + block_use().free, 0);
}

// Short-lived tensors between such as stay, of sizes that never come again: the bound of the header.
TEST_F(Blocks, AllBlocksTakeWhatIsUsedAtOnceAndAFixedRest) {
  std::vector<c10::DataPtr> stay;
  int64_t most_used = 0, most = 0;
  const auto look = [&] {
    most_used = std::max(most_used, block_use().used);
    most = std::max(most, block_use().used + block_use().free);
  };
  for (int round = 0; round < 3; ++round) {
    for (int64_t i = 0; i < 40; ++i) {
      c10::DataPtr moment = take((3 + i + 50 * round) * kMiB / 2);
      look();
      stay.push_back(take(kMiB + i * 100'000));
      look();
    }
    stay.clear();
  }
  EXPECT_LE(most, most_used + kMostFreeBlocks);
}

// The second micro-batch of a step finds all that the first one has left.
TEST_F(Blocks, WhatFallsFreeStaysForTheSameAgain) {
  for (int round = 0; round < 2; ++round) {
    std::vector<c10::DataPtr> stay;
    for (int i = 0; i < 100; ++i) {
      stay.push_back(take(kMiB));
      take(2 * kMiB).clear();
    }
    EXPECT_EQ(block_use().used + block_use().free, 102 * kMiB) << round;
  }
}

// One tensor of a size of its own does not cost the next micro-batch all that it would find.
TEST_F(Blocks, ANewOneTakesThePlaceOfAsMuch) {
  std::vector<c10::DataPtr> stay;
  for (int i = 0; i < 100; ++i) stay.push_back(take(kMiB));
  stay.clear();
  const c10::DataPtr other = take(3 * kMiB);
  EXPECT_EQ(block_use().free, 97 * kMiB);
}

TEST_F(Blocks, ReleaseGivesAllOfThemBack) {
  take(40 * kMiB).clear();
  EXPECT_EQ(block_use().free, 40 * kMiB);
  release_free_blocks();
  EXPECT_EQ(block_use().free, 0);
}

}  // namespace
}  // namespace titanium
