#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "titanium/base/error.h"
#include "titanium/base/random.h"

namespace titanium {
namespace {

// Known answers published with the reference implementation (Random123, kat_vectors).
TEST(Random, PhiloxKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(philox4x32({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, {0xffffffffu, 0xffffffffu}),
            (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
  EXPECT_EQ(philox4x32({0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}),
            (std::array<uint32_t, 4>{0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}));
}

TEST(Random, StreamsAndPurposesDiffer) {
  std::set<uint64_t> seen;
  for (uint64_t seed : {0u, 1u}) {
    for (auto purpose : {Purpose::kInit, Purpose::kShuffle}) {
      for (uint64_t stream : {0u, 1u, 2u}) {
        for (uint64_t counter : {0u, 1u, 2u}) seen.insert(Random(seed, purpose, stream).bits(counter));
      }
    }
  }
  EXPECT_EQ(seen.size(), 2u * 2 * 3 * 3);
}

TEST(Random, MomentsOfUniformAndNormal) {
  const Random random(7, Purpose::kTest);
  const int n = 100000;
  double u = 0, g = 0, g2 = 0;
  for (int i = 0; i < n; ++i) {
    u += random.uniform(i);
    const double x = random.normal(i);
    g += x;
    g2 += x * x;
  }
  EXPECT_NEAR(u / n, 0.5, 5 * std::sqrt(1.0 / 12 / n));
  EXPECT_NEAR(g / n, 0.0, 5 / std::sqrt(n));
  EXPECT_NEAR(g2 / n, 1.0, 5 * std::sqrt(2.0 / n));
}

TEST(Random, PermutationIsAPermutationAndDependsOnTheStream) {
  auto a = permutation(Random(3, Purpose::kShuffle, 0), 1000);
  const auto b = permutation(Random(3, Purpose::kShuffle, 1), 1000);
  EXPECT_NE(a, b);
  EXPECT_EQ(a, permutation(Random(3, Purpose::kShuffle, 0), 1000));
  std::sort(a.begin(), a.end());
  for (int64_t i = 0; i < 1000; ++i) ASSERT_EQ(a[i], i);
  EXPECT_TRUE(permutation(Random(3, Purpose::kShuffle), 0).empty());
}

TEST(Error, KindsCarryTheirMessageAndExitCode) {
  try {
    throw BadConfig("{}: unknown key '{}'", "run.toml", "modell");
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kBadConfig);
    EXPECT_STREQ(e.what(), "run.toml: unknown key 'modell'");
    EXPECT_EQ(exit_code(e.kind()), 2);
    EXPECT_STREQ(name(e.kind()), "BadConfig");
  }
}

}  // namespace
}  // namespace titanium
