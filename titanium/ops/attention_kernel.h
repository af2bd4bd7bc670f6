// Packed causal attention on plain pointers; attention.cpp makes the autograd op of it.
#pragma once
#include "titanium/ops/attention.h"
#include "titanium/ops/vector.h"

namespace titanium {

struct AttentionShape {
  int64_t N, K, H;                          // query heads, key heads, head width (a multiple of 32)
  std::vector<int64_t> q_bounds, k_bounds;  // [D + 1]
  std::vector<int64_t> k_starts;            // [D], or empty: those of k_bounds
  int64_t window;                           // 0 = none
  double scale;                             // > 0
};

// T is at::BFloat16, float or double; sums, softmax and `lse` [N, Tq] (the natural log of the sum of
// exponentials) are in Wide<T>.  bf16 only where has_bf16_tiles().
template <typename T>
void attention_forward(const AttentionShape& shape, const T* q, const T* k, const T* v, T* out, Wide<T>* lse);

template <typename T>
void attention_backward(const AttentionShape& shape, const T* q, const T* k, const T* v, const T* out,
                        const Wide<T>* lse, const T* d_out, T* dq, T* dk, T* dv);

}  // namespace titanium
