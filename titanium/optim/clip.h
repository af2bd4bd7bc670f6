// The global gradient norm, and clipping to it.
#pragma once
#include <cmath>
#include <string>
#include <vector>

#include "titanium/shard/param_store.h"

namespace titanium {

// The first element of a weight's gradient that is not finite.
struct BadGradient {
  std::string name;
  int64_t index = 0;  // row-major in the whole weight
  double value = 0;   // NaN or an infinity
};

struct GradNorm {
  double value = 0;              // L2 over all ranks' elements, before clipping
  std::vector<BadGradient> bad;  // when value is not finite: up to 5 weights, in the order of the table
  bool finite() const { return std::isfinite(value); }
  std::string describe() const;  // for a warning: "gradient norm nan: model.norm.weight[3] = inf, ..."
};

// Squares are summed in fp64, in an order that depends on the shard alone, then over ranks.  Every element
// has one owner and gaps are zero, so this is a plain sum; a tied weight counts once.  Units without a
// gradient count 0.
GradNorm grad_norm(const ParamStore& store);

// min(1, max_norm / (norm + 1e-6)) (torch.nn.utils.clip_grad_norm_); 1 when max_norm <= 0 (no clipping).
// Multiply it into the gradients always (UpdateOptions::clip).
double clip_coefficient(double norm, double max_norm);

}  // namespace titanium
