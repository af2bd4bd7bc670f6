// A head of one number a token, for critics and reward models.
#pragma once
#include "titanium/ops/handle.h"

namespace titanium {

// x [T, D], weight [1, D], bias [1] -> x weight^T + bias, [T] in the statistics' dtype: fp32 for bf16 x, so
// that values are not rounded to 8 bits.
at::Tensor value_head(const at::Tensor& x, const Handle& weight, const Handle& bias);

}  // namespace titanium
