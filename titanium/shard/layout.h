// Where every element of a unit lies, on any rank: plain arithmetic (design D3).
#pragma once
#include <cstdint>
#include <vector>

#include "titanium/shard/weight.h"

namespace titanium {

// A unit as the holders of one tensor-parallel coordinate have it: its weights' parts one after the other,
// cut evenly over the ranks of the replica group.
struct UnitLayout {
  static constexpr int64_t kAlign = 64;  // elements: weights and cuts start on multiples of it, gaps are zero

  UnitLayout(const std::vector<Weight*>& weights, int tp, int group_size);

  std::vector<int64_t> offsets;  // of each weight
  int64_t numel = 0;             // of the whole, gaps included; a multiple of the group's size
  int64_t part = 0;              // elements of each rank
};

}  // namespace titanium
