// The passes of attention over one tile, between its products.  A tile holds kKeys keys by `width` columns,
// width a multiple of 16; a column is one query of one head.  Keys run down, columns across, so that a
// column's softmax needs no sum across lanes, and no column's bits depend on another's.
#pragma once
#include "titanium/ops/tile_gemm.h"

namespace titanium {

constexpr int kKeys = 64;     // keys of a block; block j holds the keys 64 j ... of its document
constexpr int kColumns = 64;  // columns of a tile at most

// Columns of the softmax in progress.  In units of log2: `max` is a value near the largest score so far (-inf
// before the first), `sum` the sum of 2^(score - max).
template <typename A>
struct Running {
  alignas(64) A max[kColumns];
  alignas(64) A sum[kColumns];
  alignas(64) A shrink[kColumns];  // what the last step multiplied the sums of the columns by
};

// scores [kKeys][width]: -inf where the key's place in the block is below low[c], or is high[c] or above.
// Bounds are in the type of the scores, in which compilers compare vectors well.
void hide_before(int width, const float* low, float* scores);
void hide_before(int width, const double* low, double* scores);
void hide_from(int width, const float* high, float* scores);
void hide_from(int width, const double* high, double* scores);

// Raw scores [kKeys][width] times `scale` are log2 of the weights.  Writes the weights, relative to
// running.max, to weights [kKeys / kPair][width][kPair].  Returns whether a column's earlier sums must be
// multiplied by running.shrink.
bool softmax_step(int width, const float* scores, float scale, Running<float>& running,
                  at::BFloat16* weights);
bool softmax_step(int width, const float* scores, float scale, Running<float>& running, float* weights);
bool softmax_step(int width, const double* scores, double scale, Running<double>& running, double* weights);

// sums [rows][width] times factor [width].
void scale_columns(int rows, int width, const float* factor, float* sums);
void scale_columns(int rows, int width, const double* factor, double* sums);

// From scores and the gradients d_weights of the weights [kKeys][width]: weights p = 2^(score scale -
// lse2[c]) and gradients of the scores p (d_weight - delta[c]), both as [kKeys][width], and the latter again
// as [kKeys / kPair][width][kPair] where that differs.
void gradient_step(int width, const float* scores, const float* d_weights, float scale, const float* lse2,
                   const float* delta, at::BFloat16* weights, at::BFloat16* d_scores,
                   at::BFloat16* d_scores_paired);
void gradient_step(int width, const float* scores, const float* d_weights, float scale, const float* lse2,
                   const float* delta, float* weights, float* d_scores, float* d_scores_paired);
void gradient_step(int width, const double* scores, const double* d_weights, double scale, const double* lse2,
                   const double* delta, double* weights, double* d_scores, double* d_scores_paired);

}  // namespace titanium
