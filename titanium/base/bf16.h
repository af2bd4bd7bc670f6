// bfloat16 as bits, for loops that compilers turn into vector code.
#pragma once
#include <cstdint>

#include "titanium/base/clones.h"

namespace titanium {

struct BF16 {
  uint16_t bits;
};

TITANIUM_INLINE float load(BF16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}

TITANIUM_INLINE void store(BF16& to, float x) {  // nearest, ties to even; a NaN stays one
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  to.bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

}  // namespace titanium
