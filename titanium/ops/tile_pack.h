// Rows of a tensor into the layouts that tile_gemm reads, and back.  H, the width of a row, is a multiple
// of 32.
#pragma once
#include "titanium/ops/tile_gemm.h"

namespace titanium {

// rows: `width` pointers to H numbers.  -> right [H / kPair][width][kPair], each row a column.  width a
// multiple of 16.
void pack_columns(int width, int H, const at::BFloat16* const* rows, at::BFloat16* right);
void pack_columns(int width, int H, const float* const* rows, float* right);
void pack_columns(int width, int H, const double* const* rows, double* right);

// -> right [width / kPair][H][kPair], each row a row.
void pack_rows(int width, int H, const at::BFloat16* const* rows, at::BFloat16* right);
void pack_rows(int width, int H, const float* const* rows, float* right);
void pack_rows(int width, int H, const double* const* rows, double* right);

// -> left [H][width], each row a column, not interleaved.
void pack_transposed(int width, int H, const at::BFloat16* const* rows, at::BFloat16* left);
void pack_transposed(int width, int H, const float* const* rows, float* left);
void pack_transposed(int width, int H, const double* const* rows, double* left);

// columns [H][width] times factor [width] -> rows, the first `count` columns.
void unpack_columns(int count, int width, int H, const float* columns, const float* factor,
                    at::BFloat16* const* rows);
void unpack_columns(int count, int width, int H, const float* columns, const float* factor,
                    float* const* rows);
void unpack_columns(int count, int width, int H, const double* columns, const double* factor,
                    double* const* rows);

}  // namespace titanium
