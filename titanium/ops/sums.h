// Sums over tokens, in the dtype of their target and in an order that is a function of the shapes alone.
// add_outer (linear.h) is the third of them.
#pragma once
#include "titanium/ops/handle.h"

namespace titanium {

// g [T, O] -> [O], in fp32 (fp64 for fp64): the gradient of a bias.
at::Tensor sum_rows(const at::Tensor& g);

// Adds sum_rows(g) to the gradient of a bias; nothing for none or a frozen one.
void accumulate_bias(const Handle* bias, const at::Tensor& g);

// sink [V, D] += the rows of g [T, D] at ids [T] int64: the gradient of an embedding.
void add_rows(const at::Tensor& sink, const at::Tensor& ids, const at::Tensor& g);

}  // namespace titanium
