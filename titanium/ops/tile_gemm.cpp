#include "titanium/ops/tile_gemm.h"

#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>

#include <vector>

namespace titanium {
namespace {

// R rows by V vectors of C at once; k ascending.
template <typename A, int R, int V>
TITANIUM_INLINE void block(int n, int k, const A* a, const A* b, A* c, bool add) {
  Vector<A> sum[R][V] = {};
  for (int i = 0; i < k; ++i) {
    Vector<A> right[V];
    for (int v = 0; v < V; ++v) right[v] = load(b + i * static_cast<int64_t>(n) + v * kLanes<A>);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] += a[r * static_cast<int64_t>(k) + i] * right[v];
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) {
      A* to = c + r * static_cast<int64_t>(n) + v * kLanes<A>;
      store(to, add ? load(to) + sum[r][v] : sum[r][v]);
    }
}

template <typename A, int R>
TITANIUM_INLINE void rows(int n, int k, const A* a, const A* b, A* c, bool add) {
  int j = 0;
  for (; j + 4 * kLanes<A> <= n; j += 4 * kLanes<A>) block<A, R, 4>(n, k, a, b + j, c + j, add);
  for (; j < n; j += kLanes<A>) block<A, R, 1>(n, k, a, b + j, c + j, add);
}

template <typename A>
TITANIUM_INLINE void loops(int m, int n, int k, const A* a, const A* b, A* c, bool add) {
  int i = 0;
  for (; i + 4 <= m; i += 4)
    rows<A, 4>(n, k, a + i * static_cast<int64_t>(k), b, c + i * static_cast<int64_t>(n), add);
  for (; i < m; ++i)
    rows<A, 1>(n, k, a + i * static_cast<int64_t>(k), b, c + i * static_cast<int64_t>(n), add);
}

TITANIUM_CLONES void loops_fp32(int m, int n, int k, const float* a, const float* b, float* c, bool add) {
  loops(m, n, k, a, b, c, add);
}
TITANIUM_CLONES void loops_fp64(int m, int n, int k, const double* a, const double* b, double* c, bool add) {
  loops(m, n, k, a, b, c, add);
}

// libtorch has no question for it: brgemm throws where the CPU or the build lacks it.
template <typename T>
bool brgemm_works(bool vnni) {
  try {
    std::vector<T> a(16 * 32, T(1.0f)), b(32 * 16, T(1.0f));
    std::vector<float> c(16 * 16);
    at::native::cpublas::brgemm(16, 16, 32, 32, 16, 16, false, a.data(), b.data(), c.data(), vnni);
    at::native::cpublas::brgemm_release(vnni);
    for (float x : c)
      if (x != 32.0f) return false;
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

bool has_bf16_tiles() {
  static const bool works = brgemm_works<at::BFloat16>(true);
  return works;
}

void tile_gemm(int m, int n, int k, const at::BFloat16* a, const at::BFloat16* b, float* c, bool add) {
  at::native::cpublas::brgemm(m, n, k, k, n, n, add, a, b, c, true);
}

void tile_gemm(int m, int n, int k, const float* a, const float* b, float* c, bool add) {
  static const bool works = brgemm_works<float>(false);
  if (works) {
    at::native::cpublas::brgemm(m, n, k, k, n, n, add, a, b, c, false);
  } else {
    loops_fp32(m, n, k, a, b, c, add);
  }
}

void tile_gemm(int m, int n, int k, const double* a, const double* b, double* c, bool add) {
  loops_fp64(m, n, k, a, b, c, add);
}

void release_tiles() {
  if (has_bf16_tiles()) at::native::cpublas::brgemm_release(true);
}

}  // namespace titanium
