#pragma once
#include "titanium/ops/handle.h"
#include "titanium/ops/row_exchange.h"

namespace titanium {

// x [..., D], weight [D] -> x / sqrt(mean(x^2) + eps) * weight, statistics in fp32 (fp64 for fp64), result in
// x's dtype. Zhang and Sennrich, "Root mean square layer normalization", 2019.
at::Tensor rms_norm(const at::Tensor& x, const Handle& weight, double eps);

// linear(rms_norm(x)) as one op that keeps x [T, D] and one number a row, and normalises again in backward,
// unless it shall `keep` the normalised rows.  With `rows`, x is this rank's part of the tokens [T/n, D] and
// the result is of all of them [T, O]: the normalised rows are gathered (those that are not kept again in
// backward), and gradients by them are summed over the ranks and then rounded.
at::Tensor norm_linear(const at::Tensor& x, const Handle& norm, double eps, const Handle& weight,
                       const Handle* bias = nullptr, const RowExchange* rows = nullptr, bool keep = false);

}  // namespace titanium
