// Sums, maxima and minima over the ranks' rows of numbers: bandwidth bound, in rank order.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "titanium/dist/group.h"

namespace titanium {

// rows: `count` pointers to n numbers of `dtype`, in rank order; out may be one of them.  16-bit dtypes are
// added in fp32 and rounded once.  A NaN of any row gives a NaN.  Bug for a dtype that holds no such numbers.
void reduce_rows(at::ScalarType dtype, ReduceOp op, void* out, const void* const* rows, int count, int64_t n);
// Bug as reduce_rows.
void check_reducible(at::ScalarType dtype);

}  // namespace titanium
