#include "titanium/dist/local_reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "titanium/base/bf16.h"
#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr int64_t kTile = 1024;  // numbers whose running sum stays in the first cache

template <typename T>
TITANIUM_INLINE T load(T x) {
  return x;
}
TITANIUM_INLINE float load(at::Half x) {
  return static_cast<float>(x);
}

template <typename T>
TITANIUM_INLINE void store(T& to, T x) {
  to = x;
}
TITANIUM_INLINE void store(at::Half& to, float x) {
  to = static_cast<at::Half>(x);
}

template <typename A>
TITANIUM_INLINE A combine(ReduceOp op, A a, A b) {
  if (op == ReduceOp::kSum) {
    if constexpr (std::is_integral_v<A>) {  // wraps
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
    } else {
      return a + b;
    }
  }
  const bool better = op == ReduceOp::kMax ? b > a : b < a;
  return better || b != b ? b : a;
}

template <typename T, ReduceOp op>
TITANIUM_INLINE void reduce_op(T* out, const T* const* rows, int count, int64_t n) {
  using A = decltype(load(T{}));
  A sum[kTile];
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t size = std::min(kTile, n - begin);
    const T* first = rows[0] + begin;
    for (int64_t i = 0; i < size; ++i) sum[i] = load(first[i]);
    for (int row = 1; row < count; ++row) {
      const T* other = rows[row] + begin;
      for (int64_t i = 0; i < size; ++i) sum[i] = combine(op, sum[i], load(other[i]));
    }
    T* to = out + begin;
    for (int64_t i = 0; i < size; ++i) store(to[i], sum[i]);
  }
}

template <typename T>
TITANIUM_INLINE void reduce(ReduceOp op, void* out, const void* const* raw, int count, int64_t n) {
  const T* const* rows = reinterpret_cast<const T* const*>(raw);
  T* to = static_cast<T*>(out);
  switch (op) {
    case ReduceOp::kSum:
      return reduce_op<T, ReduceOp::kSum>(to, rows, count, n);
    case ReduceOp::kMax:
      return reduce_op<T, ReduceOp::kMax>(to, rows, count, n);
    case ReduceOp::kMin:
      return reduce_op<T, ReduceOp::kMin>(to, rows, count, n);
  }
}

// Compiled whole for each instruction set.
#define TITANIUM_REDUCE(name, type)                                                                  \
  TITANIUM_CLONES void name(ReduceOp op, void* out, const void* const* rows, int count, int64_t n) { \
    reduce<type>(op, out, rows, count, n);                                                           \
  }
TITANIUM_REDUCE(reduce_bf16, BF16)
TITANIUM_REDUCE(reduce_fp16, at::Half)
TITANIUM_REDUCE(reduce_fp32, float)
TITANIUM_REDUCE(reduce_fp64, double)
TITANIUM_REDUCE(reduce_int32, int32_t)
TITANIUM_REDUCE(reduce_int64, int64_t)
#undef TITANIUM_REDUCE

using Reduce = void (*)(ReduceOp, void*, const void* const*, int, int64_t);

Reduce reduce_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return reduce_bf16;
    case at::kHalf:
      return reduce_fp16;
    case at::kFloat:
      return reduce_fp32;
    case at::kDouble:
      return reduce_fp64;
    case at::kInt:
      return reduce_int32;
    case at::kLong:
      return reduce_int64;
    default:
      throw Bug("a reduction over ranks of {}: allowed: BFloat16, Half, Float, Double, Int, Long",
                at::toString(dtype));
  }
}

}  // namespace

void reduce_rows(at::ScalarType dtype, ReduceOp op, void* out, const void* const* rows, int count,
                 int64_t n) {
  reduce_of(dtype)(op, out, rows, count, n);
}

void check_reducible(at::ScalarType dtype) {
  reduce_of(dtype);
}

}  // namespace titanium
