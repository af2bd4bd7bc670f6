// Which rows or columns of a weight each coordinate of the tensor-parallel axis holds: arithmetic alone.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "titanium/shard/weight.h"

namespace titanium {

// `extent` cut over tp coordinates as evenly as possible, the first ones taking one more.  BadConfig
// when there are more coordinates than there is to cut; `key` is what config.json calls the extent.
std::vector<TpPart> split_evenly(int64_t extent, int tp, const std::string& key);

// Heads of attention, each [tp].  A coordinate holds the key heads of its query heads, whole groups of them
// as far as they go; with more coordinates than key heads, those that share a key head divide its queries.
struct HeadSplit {
  std::vector<TpPart> queries, keys;  // in heads
};
// N query heads over K key heads, which divide them.  BadConfig when tp is above N.
HeadSplit split_heads(int64_t N, int64_t K, int tp);

// The same parts where each thing that was cut is `width` rows.
std::vector<TpPart> times_width(std::vector<TpPart> parts, int64_t width);

}  // namespace titanium
