// The fused head (design D6): linear + log-softmax + gather, over chunks of tokens, so that logits [T, V] never exist.
#pragma once
#include "titanium/ops/handle.h"

namespace titanium {

struct HeadWants {
  bool entropy = false;
  bool sum_pi_squared = false;
};

// Each [T], fp32 (fp64 in an fp64 run); undefined where not wanted.
struct HeadStats {
  at::Tensor logprob;         // log p(labels[t]); 0 where labels[t] < 0
  at::Tensor entropy;         // -sum_v p_v log p_v, nats
  at::Tensor sum_pi_squared;  // sum_v p_v^2
};

// x [T, D], weight [V, D], bias-free; p = softmax(x weight^T / temperature).  labels [T] int64, negative = none.
// temperature [T] in the statistics' dtype, or undefined for 1.  rows [R] int64: the positions to compute, ascending; the
// others get 0 and no gradient; undefined = all.  Log-sum-exp is in fp32 for bf16 x.  All three outputs have gradients.
HeadStats linear_logprob(const at::Tensor& x, const Handle& weight, const at::Tensor& labels,
                         const at::Tensor& temperature = {}, const at::Tensor& rows = {}, HeadWants wants = {});

// Logits of few rows, for sampling: x [T, D] -> [T, V] in fp32 (fp64).
at::Tensor logits(const at::Tensor& x, const Handle& weight);

}  // namespace titanium
