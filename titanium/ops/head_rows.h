// Passes over rows of logits: what the fused head does between its products.
#pragma once
#include <cstdint>

#include "titanium/ops/vector.h"

namespace titanium {

// What is known of a row's softmax after some of its logits, in fp64 and relative to the largest: with d = z
// - max, the sums of exp(d), d exp(d) and exp(d)^2.
struct RowSums {
  double max = -kInfinity<double>, sum = 0, weighted = 0, squares = 0;
  double target = 0;  // the label's logit
};

// Takes in n logits z / temperature; `moments`: also `weighted` and `squares`.
void add_logits(const float* z, int64_t n, float inverse_temperature, bool moments, RowSums* row);
void add_logits(const double* z, int64_t n, double inverse_temperature, bool moments, RowSums* row);

// Takes in what another part of the vocabulary gave; one of the two holds the label.
void add_sums(const RowSums& part, RowSums* row);

// The gradient by a row's logits is p (constant + by_logp log p + by_p p), plus `at_label` at its label.
template <typename A>
struct RowGradient {
  A inverse_temperature, lse, constant, by_logp, by_p;
};

// z [n] becomes the gradient, without what the label adds.
void logit_gradients(float* z, int64_t n, const RowGradient<float>& row);
void logit_gradients(double* z, int64_t n, const RowGradient<double>& row);

// to [n] = from, rounded; to [n, padded) = 0.
void narrow_row(const float* from, int64_t n, int64_t padded, at::BFloat16* to);
void narrow_row(const float* from, int64_t n, int64_t padded, float* to);
void narrow_row(const double* from, int64_t n, int64_t padded, double* to);

}  // namespace titanium
