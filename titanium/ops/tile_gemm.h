// Products of small dense tiles, the inner loop of attention.
// bf16 goes to the matrix units through libtorch's brgemm, fp32 to brgemm's vector code, fp64 to loops of our
// own.
#pragma once
#include "titanium/ops/vector.h"

namespace titanium {

// Rows of the right operand that lie interleaved: B [k / 2][n][2] for bf16, B [k][n] otherwise.
template <typename T>
constexpr int kPair = sizeof(T) == 2 ? 2 : 1;

// C [m, n] (+)= A [m, k] B [k, n], C dense in Wide<T>, A and B dense.  n a multiple of 16, k a multiple
// of 16. An element of C depends on its row of A and its column of B alone, to the bit: neither m, n nor the
// place of the row or column in the tile changes it.
void tile_gemm(int m, int n, int k, const at::BFloat16* a, const at::BFloat16* b, float* c, bool add);
void tile_gemm(int m, int n, int k, const float* a, const float* b, float* c, bool add);
void tile_gemm(int m, int n, int k, const double* a, const double* b, double* c, bool add);

// Whether the CPU multiplies bf16 tiles; if not, the caller computes in fp32.
bool has_bf16_tiles();
// Whether it does so in matrix units, many times as fast as in vector units.
bool has_amx();
// Whether libtorch's brgemm multiplies fp32 tiles; if not, there are loops of our own.
bool has_fp32_tiles();

// Gives back what tile_gemm set up on this thread: call it after the last product of a parallel region,
// before anything else may use the matrix unit.
void release_tiles();

}  // namespace titanium
