// The fused head (design D6): linear + log-softmax + gather, over chunks of tokens, so that logits [T, V]
// never exist.
#pragma once
#include "titanium/ops/handle.h"
#include "titanium/ops/vocab_slice.h"

namespace titanium {

struct HeadWants {
  bool entropy = false;
  bool sum_pi_squared = false;
};

// What a head says of each token.  Each [T], fp32 (fp64 in an fp64 run); undefined where not wanted.
struct HeadStats {
  at::Tensor logprob;         // log p(labels[t]); 0 where labels[t] < 0
  at::Tensor entropy;         // -sum_v p_v log p_v, nats
  at::Tensor sum_pi_squared;  // sum_v p_v^2
  at::Tensor value{};         // of the text up to token t, from a value head, which gives nothing else
};

// x [T, D], weight [V, D], bias-free; p = softmax(x weight^T / temperature).  labels [T] int64, negative =
// none. temperature [T] in the statistics' dtype, or undefined for 1.  rows [R] int64: the positions to
// compute, ascending; the others get 0 and no gradient; undefined = all.  Log-sum-exp is in fp32 for bf16 x.
// All three outputs have gradients.  With `slice` the weight is a part of the vocabulary: labels and outputs
// are of the whole, the gradient by x is the part that the slice gives, to be summed over the ranks; but with
// slice->rows x is this rank's part of the tokens [T/n, D], and so is the sum that its gradient then is.
HeadStats linear_logprob(const at::Tensor& x, const Handle& weight, const at::Tensor& labels,
                         const at::Tensor& temperature = {}, const at::Tensor& rows = {},
                         HeadWants wants = {}, const VocabSlice* slice = nullptr);

// The head of a loss that is linear in the log-probs and whose weights are known beforehand (SFT):
//   loss = -sum_t weights[t] log p(labels[t]),  a scalar in the statistics' dtype, summed in fp64;
// logprob is that of linear_logprob, for reports, and carries no gradient.  The call forms
// the loss, its gradient by x and the gradient of the head, which is added to the handle in this call, not in
// backward.  So the loss must be summed into the objective as it is (design D4: all scale lives in
// `weights`): backward refuses, as a Bug, any incoming gradient but 1.  Without grad mode only the values are
// formed. weights [T] in the statistics' dtype; x, weight, labels, temperature, rows and slice as in
// linear_logprob.
struct WeightedNll {
  at::Tensor loss, logprob;
};
WeightedNll weighted_nll(const at::Tensor& x, const Handle& weight, const at::Tensor& labels,
                         const at::Tensor& weights, const at::Tensor& temperature = {},
                         const at::Tensor& rows = {}, const VocabSlice* slice = nullptr);

// Logits of few rows, for sampling: x [T, D] -> [T, V] in fp32 (fp64), of the whole vocabulary.
at::Tensor logits(const at::Tensor& x, const Handle& weight, const VocabSlice* slice = nullptr);

// The log-prob of a label from such a row [V], the bits that linear_logprob gives in bf16 for the whole
// vocabulary.
float logprob_of_row(const float* logits, int64_t V, int64_t label, float temperature);

}  // namespace titanium
