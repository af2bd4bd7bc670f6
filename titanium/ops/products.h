// The three products of a linear layer: by blocks of our own for bf16 (gemm.h), by ATen for fp32 and fp64.
// The third, the weight gradient, is add_outer in linear.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <variant>

#include "titanium/ops/gemm.h"
#include "titanium/ops/handle.h"

namespace titanium {

// A bf16 matrix w [O, I] in the blocks that x w^T multiplies: for many products with few rows each, which
// would else spend their time on making them.
class PackedWeight {
 public:
  explicit PackedWeight(const at::Tensor& w);

 private:
  friend at::Tensor times_transposed(const at::Tensor&, const PackedWeight&, const at::Tensor&,
                                     const at::Tensor&);
  friend at::Tensor wide_times_transposed(const at::Tensor&, const PackedWeight&);
  std::variant<Right<at::BFloat16>, Right<float>> blocks_;
};

// x [T, I], w [O, I] -> x w^T (+ bias [O]) (+ residual [T, O])  [T, O].  Rounded once, at the end.
at::Tensor times_transposed(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias = {},
                            const at::Tensor& residual = {});

at::Tensor times_transposed(const at::Tensor& x, const PackedWeight& w, const at::Tensor& bias = {},
                            const at::Tensor& residual = {});

// g [T, O], w [O, I] -> g w  [T, I].
at::Tensor times(const at::Tensor& g, const at::Tensor& w);

// The same two in the statistics' dtype, not rounded: this rank's part of a sum over ranks.
at::Tensor wide_times_transposed(const at::Tensor& x, const at::Tensor& w);
at::Tensor wide_times_transposed(const at::Tensor& x, const PackedWeight& w);
at::Tensor wide_times(const at::Tensor& g, const at::Tensor& w);

// Such a sum [T, O] (+ bias [O]) (+ residual [T, O]) in `dtype`, rounded once, as times_transposed does.
at::Tensor round_sum(const at::Tensor& sum, at::ScalarType dtype, const at::Tensor& bias = {},
                     const at::Tensor& residual = {});

// Bytes of the packed operands that a forward and a backward of a layer [O, I] hold at once, for T rows of
// `element` bytes a number.
struct LinearWork {
  int64_t forward, backward;
};
LinearWork linear_work(int64_t T, int64_t O, int64_t I, int64_t element);

}  // namespace titanium
