// One pass over flat memory for each update.  No torch here: the file is compiled once for each instruction
// set, without fused multiply-adds, so that every CPU gives the same bits.
#pragma once
#include <cstdint>

namespace titanium {

enum class Element { kF32, kBF16, kF64 };

struct AdamWCoefficients {
  double clip;  // times the gradient
  double keep;  // 1 - lr wd
  double beta1, beta2;
  double rate;        // lr / (1 - beta1^t)
  double correction;  // 1 / sqrt(1 - beta2^t)
  double eps;
};

// Element i of every array, i < n.  Arithmetic in fp32, or in fp64 where any of the three is fp64.  `cast`,
// where it is not null, gets the new param in bf16 while that is in the first cache (nearest, ties to even).
using AdamWKernel = void (*)(void* param, void* grad, void* exp_avg, void* exp_avg_sq, void* cast, int64_t n,
                             const AdamWCoefficients& c, bool zero_grad);
AdamWKernel adamw_kernel(Element param, Element grad, Element state);  // null: no such combination

struct SgdCoefficients {
  double clip, lr, weight_decay, momentum;
};
// buffer may be null when momentum is 0; cast as above.
using SgdKernel = void (*)(void* param, void* grad, void* buffer, void* cast, int64_t n,
                           const SgdCoefficients& c, bool zero_grad);
SgdKernel sgd_kernel(Element param, Element grad, Element state);

// The sum of squares in fp64, in an order that depends on n alone.
double sum_of_squares(const float* x, int64_t n);
double sum_of_squares(const double* x, int64_t n);

}  // namespace titanium
