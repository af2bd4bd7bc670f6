// 64-byte vectors for the kernels of this room, by the vector extension of GCC and Clang: 16 fp32 or 8 fp64
// lanes. Everything here is inlined, so that a function marked TITANIUM_CLONES is compiled whole for each
// instruction set and the CPU picks one when the program starts.
#pragma once
#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "titanium/base/clones.h"

// Vectors are passed between inlined functions only, so the calling convention that GCC warns of is never
// used.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace titanium {

template <typename A>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float Real __attribute__((vector_size(64)));
  typedef int32_t Int __attribute__((vector_size(64)));
  typedef uint32_t Bits __attribute__((vector_size(64)));
  typedef uint16_t Half __attribute__((vector_size(32)));
};
template <>
struct VectorOf<double> {
  typedef double Real __attribute__((vector_size(64)));
  typedef int64_t Int __attribute__((vector_size(64)));
  typedef uint64_t Bits __attribute__((vector_size(64)));
};
template <typename A>
using Vector = typename VectorOf<A>::Real;
template <typename A>
using IntVector = typename VectorOf<A>::Int;

template <typename A>
using BitVector = typename VectorOf<A>::Bits;

template <typename A>
constexpr int kLanes = 64 / sizeof(A);

template <typename A>
constexpr A kInfinity = std::numeric_limits<A>::infinity();

// What a kernel computes in when it stores T.
template <typename T>
struct WideOf {
  using Type = T;
};
template <>
struct WideOf<at::BFloat16> {
  using Type = float;
};
template <typename T>
using Wide = typename WideOf<T>::Type;

template <typename A>
TITANIUM_INLINE Vector<A> load(const A* from) {
  Vector<A> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <typename A>
TITANIUM_INLINE void store(A* to, Vector<A> v) {
  std::memcpy(to, &v, sizeof v);
}
template <typename A>
TITANIUM_INLINE Vector<A> splat(A a) {
  return a - Vector<A>{};
}

TITANIUM_INLINE BitVector<float> bits_of(Vector<float> v) {
  BitVector<float> bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
TITANIUM_INLINE BitVector<double> bits_of(Vector<double> v) {
  BitVector<double> bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
}
TITANIUM_INLINE Vector<float> from_bits(BitVector<float> bits) {
  Vector<float> v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
TITANIUM_INLINE Vector<double> from_bits(BitVector<double> bits) {
  Vector<double> v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

// The bits of the bf16 nearest to each lane, ties to even, in the upper half of the lane; the lower half is
// not cleared.  An infinity stays one, a NaN stays one when its lower 16 bits are clear, as those made by
// hardware or read from bf16 are.
TITANIUM_INLINE BitVector<float> round_to_bf16(Vector<float> v) {
  const BitVector<float> bits = bits_of(v);
  return bits + 0x7fff + ((bits >> 16) & 1);
}

// kLanes<Wide<T>> numbers of type T as a wide vector, and back.
TITANIUM_INLINE Vector<float> load_wide(const float* from) {
  return load(from);
}
TITANIUM_INLINE Vector<double> load_wide(const double* from) {
  return load(from);
}
TITANIUM_INLINE Vector<float> load_wide(const at::BFloat16* from) {
  VectorOf<float>::Half half;
  std::memcpy(&half, from, sizeof half);
  return from_bits(__builtin_convertvector(half, BitVector<float>) << 16);
}
TITANIUM_INLINE void store_narrow(float* to, Vector<float> v) {
  store(to, v);
}
TITANIUM_INLINE void store_narrow(double* to, Vector<double> v) {
  store(to, v);
}
TITANIUM_INLINE void store_narrow(at::BFloat16* to, Vector<float> v) {
  const auto half = __builtin_convertvector(round_to_bf16(v) >> 16, VectorOf<float>::Half);
  std::memcpy(to, &half, sizeof half);
}

// 2^x, within 2 units in the last place (fp32: the polynomial of degree 6 that is 1 at 0 and has the least
// relative error on [-1/2, 1/2], 0.03 * 2^-24; fp64: the Taylor series).  2^0 is exactly 1.  Results below
// the smallest normal number, and 2^-inf, are 0.  x must be below 127 (1023); NaN gives NaN.
TITANIUM_INLINE Vector<float> exp2(Vector<float> x) {
  using V = Vector<float>;
  const V clamped = x < -127.0f ? splat(-127.0f) : x;
  const V shifted = clamped + 12582912.0f;  // 1.5 * 2^23: rounds to an integer, which lies in the lower bits
  const V f = clamped - (shifted - 12582912.0f);
  V p = f * 0.0001535336204233374f + 0.001339887449921631f;
  p = p * f + 0.009618437357845625f;
  p = p * f + 0.05550332470928511f;
  p = p * f + 0.2402264791362294f;
  p = p * f + 0.6931472028551445f;
  p = p * f + 1.0f;
  return x < -126.0f ? V{} : from_bits(bits_of(p) + (bits_of(shifted) << 23));
}
TITANIUM_INLINE Vector<double> exp2(Vector<double> x) {
  using V = Vector<double>;
  constexpr double kLn2 = 0.693147180559945309417;
  const V clamped = x < -1023.0 ? splat(-1023.0) : x;
  const V shifted = clamped + 6755399441055744.0;  // 1.5 * 2^52
  const V z = (clamped - (shifted - 6755399441055744.0)) * kLn2;
  V p = splat(1.0);
  for (int k = 13; k > 0; --k) p = p * (z / static_cast<double>(k)) + 1.0;
  return x < -1022.0 ? V{} : from_bits(bits_of(p) + (bits_of(shifted) << 52));
}

}  // namespace titanium
