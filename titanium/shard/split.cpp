#include "titanium/shard/split.h"

#include "titanium/base/error.h"

namespace titanium {
namespace {

// Where part i of n begins, the first extent % n of them being one longer.
int64_t begin_of(int64_t extent, int64_t n, int64_t i) {
  return extent / n * i + std::min(extent % n, i);
}

void refuse(int64_t extent, int tp, const std::string& key) {
  throw BadConfig(
      "parallelism.tensor_parallel_degree is {}, but config.json has {} {}: at most {} ranks can share them",
      tp, key, extent, extent);
}

}  // namespace

std::vector<TpPart> split_evenly(int64_t extent, int tp, const std::string& key) {
  if (extent < tp) refuse(extent, tp, key);
  std::vector<TpPart> parts;
  for (int rank = 0; rank < tp; ++rank)
    parts.push_back({begin_of(extent, tp, rank), begin_of(extent, tp, rank + 1), rank, rank + 1});
  return parts;
}

HeadSplit split_heads(int64_t N, int64_t K, int tp) {
  if (N < tp) refuse(N, tp, "num_attention_heads");
  const int64_t group = N / K;  // queries of a key head
  HeadSplit split;
  if (tp <= K) {
    split.keys = split_evenly(K, tp, "num_key_value_heads");
    split.queries = times_width(split.keys, group);
    return split;
  }
  for (int64_t head = 0; head < K; ++head) {
    const int first = static_cast<int>(begin_of(tp, K, head)),
              last = static_cast<int>(begin_of(tp, K, head + 1));
    for (int rank = first; rank < last; ++rank) {
      split.keys.push_back({head, head + 1, first, last});
      const int64_t at = head * group, n = last - first, i = rank - first;
      split.queries.push_back({at + begin_of(group, n, i), at + begin_of(group, n, i + 1), rank, rank + 1});
    }
  }
  return split;
}

std::vector<TpPart> times_width(std::vector<TpPart> parts, int64_t width) {
  for (TpPart& part : parts) {
    part.begin *= width;
    part.end *= width;
  }
  return parts;
}

}  // namespace titanium
