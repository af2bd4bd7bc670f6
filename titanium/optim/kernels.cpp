#include "titanium/optim/kernels.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "titanium/base/bf16.h"

namespace titanium {
namespace {

TITANIUM_INLINE float load(float x) {
  return x;
}
TITANIUM_INLINE double load(double x) {
  return x;
}

TITANIUM_INLINE void store(float& to, float x) {
  to = x;
}
TITANIUM_INLINE void store(float& to, double x) {
  to = static_cast<float>(x);
}
TITANIUM_INLINE void store(double& to, double x) {
  to = x;
}
TITANIUM_INLINE void store(BF16& to, double x) {
  store(to, static_cast<float>(x));
}

TITANIUM_INLINE float root(float x) {
  return __builtin_sqrtf(x);
}
TITANIUM_INLINE double root(double x) {
  return __builtin_sqrt(x);
}

template <typename... T>
using Real = std::conditional_t<(std::is_same_v<T, double> || ...), double, float>;

constexpr int64_t kBlock =
    1024;  // elements: the gradients of a block are zeroed while they are in the first cache

template <typename P>
TITANIUM_INLINE void write_cast(void* cast, const P* __restrict param, int64_t at, int64_t count) {
  if (cast == nullptr) return;
  BF16* __restrict to = static_cast<BF16*>(cast) + at;
  for (int64_t i = 0; i < count; ++i) store(to[i], load(param[i]));
}

template <typename P, typename G, typename S>
TITANIUM_INLINE void adamw(void* param, void* grad, void* exp_avg, void* exp_avg_sq, void* cast, int64_t n,
                           const AdamWCoefficients& c, bool zero_grad) {
  using R = Real<P, G, S>;
  const R clip = static_cast<R>(c.clip), keep = static_cast<R>(c.keep), eps = static_cast<R>(c.eps);
  const R beta1 = static_cast<R>(c.beta1), rest1 = static_cast<R>(1 - c.beta1);
  const R beta2 = static_cast<R>(c.beta2), rest2 = static_cast<R>(1 - c.beta2);
  const R rate = static_cast<R>(c.rate), correction = static_cast<R>(c.correction);
  for (int64_t at = 0; at < n; at += kBlock) {
    P* __restrict p = static_cast<P*>(param) + at;
    G* __restrict g = static_cast<G*>(grad) + at;
    S* __restrict m = static_cast<S*>(exp_avg) + at;
    S* __restrict v = static_cast<S*>(exp_avg_sq) + at;
    const int64_t count = n - at < kBlock ? n - at : kBlock;
    for (int64_t i = 0; i < count; ++i) {
      const R gradient = static_cast<R>(load(g[i])) * clip;
      const R mean = static_cast<R>(load(m[i])) * beta1 + gradient * rest1;
      const R square = static_cast<R>(load(v[i])) * beta2 + gradient * gradient * rest2;
      const R kept = static_cast<R>(load(p[i])) * keep;
      store(p[i], kept - rate * mean / (root(square) * correction + eps));
      store(m[i], mean);
      store(v[i], square);
    }
    write_cast(cast, p, at, count);
    if (zero_grad) std::memset(g, 0, static_cast<size_t>(count) * sizeof(G));
  }
}

template <typename P, typename G, typename S>
TITANIUM_INLINE void sgd(void* param, void* grad, void* buffer, void* cast, int64_t n,
                         const SgdCoefficients& c, bool zero_grad) {
  using R = Real<P, G, S>;
  const R clip = static_cast<R>(c.clip), lr = static_cast<R>(c.lr);
  const R decay = static_cast<R>(c.weight_decay), momentum = static_cast<R>(c.momentum);
  for (int64_t at = 0; at < n; at += kBlock) {
    P* __restrict p = static_cast<P*>(param) + at;
    G* __restrict g = static_cast<G*>(grad) + at;
    const int64_t count = n - at < kBlock ? n - at : kBlock;
    if (buffer != nullptr) {
      S* __restrict b = static_cast<S*>(buffer) + at;
      for (int64_t i = 0; i < count; ++i) {
        const R value = static_cast<R>(load(p[i]));
        const R gradient = static_cast<R>(load(g[i])) * clip + decay * value;
        const R sum = static_cast<R>(load(b[i])) * momentum + gradient;
        store(b[i], sum);
        store(p[i], value - lr * sum);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        const R value = static_cast<R>(load(p[i]));
        store(p[i], value - lr * (static_cast<R>(load(g[i])) * clip + decay * value));
      }
    }
    write_cast(cast, p, at, count);
    if (zero_grad) std::memset(g, 0, static_cast<size_t>(count) * sizeof(G));
  }
}

// Vectors by the compiler's extension: the lanes fix the order of the sum for every instruction set.  Of 32
// bytes, because GCC 12 widens four fp32 to fp64 in one instruction but eight in five.
typedef double Vector __attribute__((vector_size(32)));
typedef float NarrowVector __attribute__((vector_size(16)));
constexpr int kLanes = 4, kRows = 8;
// Elements.  One stream of reads leaves a core waiting for memory; asking this far ahead doubled the speed,
// AdamW's four streams gained nothing from it.
constexpr int64_t kAhead = 1024;

TITANIUM_INLINE Vector load_vector(const double* x) {
  Vector v;
  std::memcpy(&v, x, sizeof v);
  return v;
}
TITANIUM_INLINE Vector load_vector(const float* x) {
  NarrowVector v;
  std::memcpy(&v, x, sizeof v);
  return __builtin_convertvector(v, Vector);
}

template <typename T>
TITANIUM_INLINE double squares(const T* x, int64_t n) {
  Vector sums[kRows] = {};
  int64_t i = 0;
  for (; i + kRows * kLanes <= n; i += kRows * kLanes) {
    for (size_t line = 0; line < kRows * kLanes * sizeof(T); line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(x + i + kAhead) + line);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vector v = load_vector(x + i + r * kLanes);
      sums[r] += v * v;
    }
  }
  Vector all = {};
  for (int r = 0; r < kRows; ++r) all += sums[r];
  double sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += all[lane];
  for (; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

}  // namespace

// A clone is a plain function: the templates are inlined into it and compiled for its instruction set.
// fp64 masters have fp64 state, others fp32 or bf16.
// clang-format off
#define FOR_EACH_KERNEL(X)             \
  X(f32_f32_f32, float, float, float) \
  X(f32_f32_bf16, float, float, BF16) \
  X(f32_f64_f32, float, double, float) \
  X(f32_f64_bf16, float, double, BF16) \
  X(bf16_f32_f32, BF16, float, float) \
  X(bf16_f32_bf16, BF16, float, BF16) \
  X(bf16_f64_f32, BF16, double, float) \
  X(bf16_f64_bf16, BF16, double, BF16) \
  X(f64_f32_f64, double, float, double) \
  X(f64_f64_f64, double, double, double)
// clang-format on

namespace optim_kernels {
#define DEFINE(name, P, G, S)                                                                  \
  TITANIUM_CLONES void adamw_##name(void* p, void* g, void* m, void* v, void* cast, int64_t n, \
                                    const AdamWCoefficients& c, bool zero) {                   \
    adamw<P, G, S>(p, g, m, v, cast, n, c, zero);                                              \
  }                                                                                            \
  TITANIUM_CLONES void sgd_##name(void* p, void* g, void* b, void* cast, int64_t n,            \
                                  const SgdCoefficients& c, bool zero) {                       \
    sgd<P, G, S>(p, g, b, cast, n, c, zero);                                                   \
  }
FOR_EACH_KERNEL(DEFINE)
TITANIUM_CLONES double squares_f32(const float* x, int64_t n) {
  return squares(x, n);
}
TITANIUM_CLONES double squares_f64(const double* x, int64_t n) {
  return squares(x, n);
}
}  // namespace optim_kernels

namespace {
template <typename T>
constexpr Element kElement = std::is_same_v<T, float>  ? Element::kF32
                             : std::is_same_v<T, BF16> ? Element::kBF16
                                                       : Element::kF64;
}  // namespace

AdamWKernel adamw_kernel(Element param, Element grad, Element state) {
#define PICK(name, P, G, S) \
  if (param == kElement<P> && grad == kElement<G> && state == kElement<S>) return optim_kernels::adamw_##name;
  FOR_EACH_KERNEL(PICK)
#undef PICK
  return nullptr;
}

SgdKernel sgd_kernel(Element param, Element grad, Element state) {
#define PICK(name, P, G, S) \
  if (param == kElement<P> && grad == kElement<G> && state == kElement<S>) return optim_kernels::sgd_##name;
  FOR_EACH_KERNEL(PICK)
#undef PICK
  return nullptr;
}

double sum_of_squares(const float* x, int64_t n) {
  return optim_kernels::squares_f32(x, n);
}
double sum_of_squares(const double* x, int64_t n) {
  return optim_kernels::squares_f64(x, n);
}

}  // namespace titanium
