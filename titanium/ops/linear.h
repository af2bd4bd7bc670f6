// Linear layers over weight handles.  T tokens, I inputs, O outputs, D model width, V vocabulary.
#pragma once
#include "titanium/ops/handle.h"
#include "titanium/ops/row_exchange.h"
#include "titanium/ops/vocab_slice.h"

namespace titanium {

// x [T, I], weight [O, I], bias [O] or null -> x weight^T + bias  [T, O], in x's dtype.
// With `residual` [T, O] the result is residual + x weight^T + bias; its gradient passes through.
// With `rows` each rank has columns of the weight and of x: the result is this rank's rows [T/n, O] of the
// sum over ranks, which is rounded to x's dtype once; bias and residual [T/n, O] are added to it once.
at::Tensor linear(const at::Tensor& x, const Handle& weight, const Handle* bias = nullptr,
                  const at::Tensor& residual = {}, const RowExchange* rows = nullptr);

// ids [T] int64 in [0, V), weight [V, D] -> rows [T, D].  `anchor` is any tensor that requires grad: it ties
// the op into the block's graph, for ids carry no gradient.  BadData when an id is out of range.  With
// `slice` the weight is a part of the vocabulary, and ids of other parts give 0: the sum over ranks is the
// embedding.
at::Tensor embedding(const at::Tensor& ids, const Handle& weight, const at::Tensor& anchor,
                     const VocabSlice* slice = nullptr);

// sink [M, N] += a^T b,  a [T, M], b [T, N]: the weight gradient.  The sum is formed in the sink's dtype
// (fp32 for bf16 operands) and in an order that is a function of the shapes alone.
void add_outer(const at::Tensor& sink, const at::Tensor& a, const at::Tensor& b);

}  // namespace titanium
