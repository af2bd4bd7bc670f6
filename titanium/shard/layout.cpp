#include "titanium/shard/layout.h"

namespace titanium {

UnitLayout::UnitLayout(const std::vector<Weight*>& weights, int tp, int group_size) {
  const auto round_up = [](int64_t n, int64_t m) { return (n + m - 1) / m * m; };
  for (const Weight* weight : weights) {
    offsets.push_back(numel);
    numel += round_up(weight->local_numel(tp), kAlign);
  }
  numel = round_up(numel, kAlign * group_size);
  part = numel / group_size;
}

}  // namespace titanium
