#include "titanium/shard/split.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using Parts = std::vector<TpPart>;

TEST(Split, EvenlyAndTheFirstTakeOneMore) {
  EXPECT_EQ(split_evenly(1536, 1, "F"), (Parts{{0, 1536, 0, 1}}));
  EXPECT_EQ(split_evenly(1536, 2, "F"), (Parts{{0, 768, 0, 1}, {768, 1536, 1, 2}}));
  EXPECT_EQ(split_evenly(101, 4, "V"),
            (Parts{{0, 26, 0, 1}, {26, 51, 1, 2}, {51, 76, 2, 3}, {76, 101, 3, 4}}));
  EXPECT_EQ(split_evenly(3, 3, "V"), (Parts{{0, 1, 0, 1}, {1, 2, 1, 2}, {2, 3, 2, 3}}));
}

// SmolLM2 over two ranks: key heads 2+1, query heads 6+3.
TEST(Split, HeadsByWholeGroupsUnevenly) {
  const HeadSplit split = split_heads(9, 3, 2);
  EXPECT_EQ(split.keys, (Parts{{0, 2, 0, 1}, {2, 3, 1, 2}}));
  EXPECT_EQ(split.queries, (Parts{{0, 6, 0, 1}, {6, 9, 1, 2}}));
  EXPECT_EQ(split_heads(9, 3, 1).queries, (Parts{{0, 9, 0, 1}}));
  EXPECT_EQ(split_heads(4, 4, 2).queries, (Parts{{0, 2, 0, 1}, {2, 4, 1, 2}}));  // a key head for each query
}

TEST(Split, KeyHeadsAreReplicatedAndTheirQueriesDivided) {
  const HeadSplit three = split_heads(4, 2, 3);
  EXPECT_EQ(three.keys, (Parts{{0, 1, 0, 2}, {0, 1, 0, 2}, {1, 2, 2, 3}}));
  EXPECT_EQ(three.queries, (Parts{{0, 1, 0, 1}, {1, 2, 1, 2}, {2, 4, 2, 3}}));
  const HeadSplit five = split_heads(9, 3, 5);
  EXPECT_EQ(five.keys, (Parts{{0, 1, 0, 2}, {0, 1, 0, 2}, {1, 2, 2, 4}, {1, 2, 2, 4}, {2, 3, 4, 5}}));
  EXPECT_EQ(five.queries, (Parts{{0, 2, 0, 1}, {2, 3, 1, 2}, {3, 5, 2, 3}, {5, 6, 3, 4}, {6, 9, 4, 5}}));
}

// Whatever the heads: every query head is on one rank, with its key head, and holders of a slice say the
// same.
TEST(Split, EveryHeadHasOnePlace) {
  for (int64_t K = 1; K <= 8; ++K) {
    for (int64_t group = 1; group <= 8; ++group) {
      for (int tp = 1; tp <= K * group; ++tp) {
        const HeadSplit split = split_heads(K * group, K, tp);
        ASSERT_EQ(split.queries.size(), static_cast<size_t>(tp));
        ASSERT_EQ(split.keys.size(), static_cast<size_t>(tp));
        int64_t next = 0;
        for (int rank = 0; rank < tp; ++rank) {
          const TpPart &q = split.queries[rank], &k = split.keys[rank];
          EXPECT_EQ(q.begin, next);
          EXPECT_GT(q.end, q.begin);
          EXPECT_EQ(q.holders_begin, rank);
          EXPECT_EQ(q.holders_end, rank + 1);
          EXPECT_EQ(k.begin, q.begin / group);
          EXPECT_EQ(k.end, (q.end - 1) / group + 1);
          EXPECT_TRUE(k.end - k.begin == 1 || (q.end - q.begin) == (k.end - k.begin) * group);
          for (int other = 0; other < tp; ++other) {
            const bool holds = other >= k.holders_begin && other < k.holders_end;
            EXPECT_EQ(split.keys[other] == k, holds);
          }
          next = q.end;
        }
        EXPECT_EQ(next, K * group);
      }
    }
  }
}

TEST(Split, RefusesWhatIsImpossibleByName) {
  try {
    split_heads(4, 2, 5);
    FAIL();
  } catch (const BadConfig& e) {
    const std::string message = e.what();
    EXPECT_NE(message.find("num_attention_heads"), std::string::npos) << message;
    EXPECT_NE(message.find("parallelism.tensor_parallel_degree"), std::string::npos) << message;
    EXPECT_NE(message.find("5"), std::string::npos) << message;
  }
  EXPECT_THROW(split_evenly(3, 4, "vocab_size"), BadConfig);
}

TEST(Split, HeadsToRows) {
  EXPECT_EQ(times_width({{0, 2, 0, 1}, {2, 3, 1, 2}}, 64), (Parts{{0, 128, 0, 1}, {128, 192, 1, 2}}));
}

}  // namespace
}  // namespace titanium
