// The fused head on plain tensors, without autograd (linear_logprob.h has the ops).  The vocabulary is
// visited by groups of rows of the weight; a group's logits exist for one block of tokens at a time, so
// neither pass holds [T, V]. R rows, D width, V vocabulary.
#pragma once
#include <memory>
#include <vector>

#include "titanium/ops/handle.h"
#include "titanium/ops/vocab_slice.h"

namespace titanium {

struct HeadTokens {
  at::Tensor x;            // [R, D], contiguous
  at::Tensor labels;       // [R] int64, negative = none
  at::Tensor temperature;  // [R] in the statistics' dtype, or undefined for 1
  // The part of the vocabulary that the weight is, null for all of it.  Values are of the whole vocabulary
  // and the same bits on every rank; dx is what this part gives.
  const VocabSlice* slice = nullptr;
};

// [R] each, in the statistics' dtype; entropy and sum_pi_squared are undefined unless asked for.
struct HeadValues {
  at::Tensor lse, logprob, entropy, sum_pi_squared;
};

HeadValues head_forward(const HeadTokens& rows, const at::Tensor& weight, bool moments);

// Gradients by the outputs, [R] in the statistics' dtype, undefined = none.
struct HeadGradients {
  at::Tensor logprob, entropy, sum_pi_squared;
};

// Returns the gradient by rows.x [R, D], in the statistics' dtype, and accumulates that of the weight.  A
// handle that adds at once gets it in the same visit of the vocabulary; one that defers it keeps the gradient
// by the logits, [R, V] in x's dtype, until then.
at::Tensor head_backward(const HeadTokens& rows, const Handle& weight, const HeadValues& values,
                         const HeadGradients& gradients);

// Both passes for the gradient -weights [R] by logprob: returns dx, sets lse and logprob.  Where forming the
// logits again costs more than holding them, they are held for a chunk of rows: 96 MiB of fp32 at most.
at::Tensor head_nll(const HeadTokens& rows, const Handle& weight, const at::Tensor& weights,
                    HeadValues* values);
// Bytes that it holds at once besides what it is given and returns, where x has `element` bytes a number.
int64_t head_nll_work(int64_t R, int64_t D, int64_t V, int64_t element);

// x [T, D], weight [V, D] -> [T, V] in the statistics' dtype; of the whole vocabulary where the weight is a
// slice.
at::Tensor head_logits(const at::Tensor& x, const at::Tensor& weight, const PackedWeight* packed = nullptr,
                       const VocabSlice* slice = nullptr);

}  // namespace titanium
