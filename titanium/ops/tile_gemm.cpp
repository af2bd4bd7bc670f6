#include "titanium/ops/tile_gemm.h"

#include <ATen/native/CPUBlas.h>

#include <exception>
#include <vector>

#if defined(__x86_64__) && defined(__linux__)
#include <immintrin.h>
#define TITANIUM_AMX 1
#endif

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
  } catch (const std::exception&) {  // of libtorch or of oneDNN
    return false;
  }
}

#ifdef TITANIUM_AMX
// The matrix unit of Sapphire Rapids and later ("Intel 64 and IA-32 Architectures Optimization Reference
// Manual", chapter 20): eight registers of 16 rows of 64 bytes.  Four of them hold a 32 x 32 block of C, two
// A and two B.  Unlike brgemm it compiles nothing at run time for a new shape.
#define TITANIUM_AMX_CODE __attribute__((target("amx-tile,amx-bf16")))

struct alignas(64) AmxConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// R x V registers of C: a [R * 16, k], b [k / 2][V * 16][2] with rows n apart.
template <int R, int V>
TITANIUM_AMX_CODE inline void amx_block(int n, int k, const at::BFloat16* a, const at::BFloat16* b, float* c,
                                        bool add) {
  const int64_t a_step = 2 * static_cast<int64_t>(k), bc_step = 4 * static_cast<int64_t>(n);  // bytes
  const int64_t a_next = 16 * static_cast<int64_t>(k), c_next = 16 * static_cast<int64_t>(n);
  if (add) {
    _tile_loadd(0, c, bc_step);
    if constexpr (V > 1) _tile_loadd(1, c + 16, bc_step);
    if constexpr (R > 1) _tile_loadd(2, c + c_next, bc_step);
    if constexpr (R > 1 && V > 1) _tile_loadd(3, c + c_next + 16, bc_step);
  } else {
    _tile_zero(0);
    if constexpr (V > 1) _tile_zero(1);
    if constexpr (R > 1) _tile_zero(2);
    if constexpr (R > 1 && V > 1) _tile_zero(3);
  }
  for (int i = 0; i < k; i += 32) {
    const at::BFloat16* right = b + static_cast<int64_t>(i) * n;
    _tile_loadd(4, a + i, a_step);
    _tile_loadd(6, right, bc_step);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (V > 1) {
      _tile_loadd(7, right + 32, bc_step);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (R > 1) {
      _tile_loadd(5, a + a_next + i, a_step);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (V > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, bc_step);
  if constexpr (V > 1) _tile_stored(1, c + 16, bc_step);
  if constexpr (R > 1) _tile_stored(2, c + c_next, bc_step);
  if constexpr (R > 1 && V > 1) _tile_stored(3, c + c_next + 16, bc_step);
}

template <int R>
TITANIUM_AMX_CODE inline void amx_rows(int n, int k, const at::BFloat16* a, const at::BFloat16* b, float* c,
                                       bool add) {
  int j = 0;
  for (; j + 32 <= n; j += 32) amx_block<R, 2>(n, k, a, b + 2 * j, c + j, add);
  if (j < n) amx_block<R, 1>(n, k, a, b + 2 * j, c + j, add);
}

thread_local bool amx_is_set_up = false;

TITANIUM_AMX_CODE void amx_gemm(int m, int n, int k, const at::BFloat16* a, const at::BFloat16* b, float* c,
                                bool add) {
  if (!amx_is_set_up) {
    const AmxConfig config;
    _tile_loadconfig(&config);
    amx_is_set_up = true;
  }
  int i = 0;
  for (; i + 32 <= m; i += 32)
    amx_rows<2>(n, k, a + i * static_cast<int64_t>(k), b, c + i * static_cast<int64_t>(n), add);
  if (i < m) amx_rows<1>(n, k, a + i * static_cast<int64_t>(k), b, c + i * static_cast<int64_t>(n), add);
}

TITANIUM_AMX_CODE void amx_release() {
  if (amx_is_set_up) _tile_release();
  amx_is_set_up = false;
}

// libtorch packs for brgemm on CPUs with this unit alone, and has then asked the system for leave to use it.
bool amx_works() {
  static const bool works = has_bf16_tiles() && at::native::cpublas::could_pack(at::kBFloat16);
  return works;
}
#else
void amx_gemm(int, int, int, const at::BFloat16*, const at::BFloat16*, float*, bool) {}
void amx_release() {}
bool amx_works() {
  return false;
}
#endif

}  // namespace

bool has_amx() {
  return amx_works();
}

bool has_bf16_tiles() {
  static const bool works = brgemm_works<at::BFloat16>(true);
  return works;
}

bool has_fp32_tiles() {
  static const bool works = brgemm_works<float>(false);
  return works;
}

void tile_gemm(int m, int n, int k, const at::BFloat16* a, const at::BFloat16* b, float* c, bool add) {
  if (has_amx()) {
    amx_gemm(m, n, k, a, b, c, add);
  } else {
    at::native::cpublas::brgemm(m, n, k, k, n, n, add, a, b, c, true);
  }
}

void tile_gemm(int m, int n, int k, const float* a, const float* b, float* c, bool add) {
  if (has_fp32_tiles()) {
    at::native::cpublas::brgemm(m, n, k, k, n, n, add, a, b, c, false);
  } else {
    loops_fp32(m, n, k, a, b, c, add);
  }
}

void tile_gemm(int m, int n, int k, const double* a, const double* b, double* c, bool add) {
  loops_fp64(m, n, k, a, b, c, add);
}

void release_tiles() {
  // Both: brgemm remembers what it set up, and would go on without setting it up again.
  amx_release();
  if (has_bf16_tiles()) at::native::cpublas::brgemm_release(true);
}

}  // namespace titanium
