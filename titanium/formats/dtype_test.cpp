#include "titanium/formats/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

TEST(Dtype, NamesSizesAndSpellings) {
  const Dtype all[] = {Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::I64, Dtype::I32, Dtype::I16,
                       Dtype::I8,  Dtype::U8,  Dtype::U16, Dtype::U32,  Dtype::U64, Dtype::BOOL};
  const int64_t sizes[] = {8, 4, 2, 2, 8, 4, 2, 1, 1, 2, 4, 8, 1};
  for (size_t i = 0; i < std::size(all); ++i) {
    EXPECT_EQ(size_of(all[i]), sizes[i]);
    EXPECT_EQ(parse_dtype(name(all[i])), all[i]);
    EXPECT_EQ(parse_dtype(torch_name(all[i])), all[i]);
    EXPECT_EQ(is_floating(all[i]), i < 4);
  }
  EXPECT_EQ(parse_dtype("bfloat16"), Dtype::BF16);
  EXPECT_FALSE(parse_dtype("F8_E4M3"));
  EXPECT_FALSE(parse_dtype(""));
}

// The value of a 16-bit pattern by definition: exponent bits and mantissa bits, no shifts of ours.
double value(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const double mantissa = bits & ((1u << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double magnitude = exponent == 0
                               ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                               : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  return bits >> 15 ? -magnitude : magnitude;
}

struct Kind {
  int exponent_bits, mantissa_bits;
  Dtype dtype;
  uint16_t (*narrow)(float);
  float (*widen)(uint16_t);
};

class Half : public ::testing::TestWithParam<Kind> {
 protected:
  uint16_t narrow_double(double x) const {
    uint16_t out = 0;
    convert(reinterpret_cast<std::byte*>(&x), Dtype::F64, reinterpret_cast<std::byte*>(&out),
            GetParam().dtype, 1);
    return out;
  }
};

TEST_P(Half, EveryPatternWidensToItsValueAndComesBack) {
  const Kind kind = GetParam();
  const uint32_t infinity = ((1u << kind.exponent_bits) - 1) << kind.mantissa_bits;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float wide = kind.widen(static_cast<uint16_t>(bits));
    if ((bits & 0x7fff) > infinity) {
      ASSERT_TRUE(std::isnan(wide));
      ASSERT_GT(kind.narrow(wide) & 0x7fffu, infinity) << bits;
      ASSERT_EQ(kind.narrow(wide) & 0x8000u, bits & 0x8000u);
    } else if ((bits & 0x7fff) == infinity) {
      ASSERT_TRUE(std::isinf(wide));
      ASSERT_EQ(kind.narrow(wide), bits);
    } else {
      ASSERT_EQ(wide, value(bits, kind.exponent_bits, kind.mantissa_bits)) << bits;
      ASSERT_EQ(std::signbit(wide), bits >> 15 == 1);
      ASSERT_EQ(kind.narrow(wide), bits);
      ASSERT_EQ(narrow_double(wide), bits);
    }
  }
}

// Between every two neighbours: the middle goes to the even one, the floats beside the middle to the nearer
// one.
TEST_P(Half, RoundsToNearestEvenEverywhere) {
  const Kind kind = GetParam();
  const uint32_t infinity = ((1u << kind.exponent_bits) - 1) << kind.mantissa_bits;
  for (uint32_t sign : {0u, 0x8000u}) {
    for (uint32_t low = 0; low < infinity; ++low) {
      const uint32_t high = low + 1;
      // The neighbour of the largest number counts as what would follow it, which rounds to infinity.
      const double a = value(low, kind.exponent_bits, kind.mantissa_bits);
      const double b = high == infinity ? std::ldexp(1.0, 1 << (kind.exponent_bits - 1))
                                        : value(high, kind.exponent_bits, kind.mantissa_bits);
      const double s = sign ? -1 : 1;
      const float middle = static_cast<float>((a + b) / 2);
      ASSERT_EQ(kind.narrow(static_cast<float>(s) * middle), sign | (low % 2 == 0 ? low : high)) << low;
      const float below = std::nextafter(middle, 0.0f), above = std::nextafter(middle, INFINITY);
      ASSERT_EQ(kind.narrow(static_cast<float>(s) * below), sign | low) << low;
      ASSERT_EQ(kind.narrow(static_cast<float>(s) * above), sign | high) << low;
      // A double that rounds to the middle as a float must still be rounded once.
      const double middle64 = (a + b) / 2;
      ASSERT_EQ(narrow_double(s * middle64), sign | (low % 2 == 0 ? low : high)) << low;
      ASSERT_EQ(narrow_double(s * std::nextafter(middle64, 0.0)), sign | low) << low;
      ASSERT_EQ(narrow_double(s * std::nextafter(middle64, INFINITY)), sign | high) << low;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Half,
                         ::testing::Values(Kind{5, 10, Dtype::F16, f32_to_f16, f16_to_f32},
                                           Kind{8, 7, Dtype::BF16, f32_to_bf16, bf16_to_f32}),
                         [](const auto& info) { return name(info.param.dtype); });

TEST(Dtype, ExtremesAndNaN) {
  EXPECT_EQ(f32_to_f16(1e30f), 0x7c00);
  EXPECT_EQ(f32_to_f16(-1e30f), 0xfc00);
  EXPECT_EQ(f32_to_f16(65519.99f), 0x7bff);
  EXPECT_EQ(f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(f32_to_f16(std::numeric_limits<float>::denorm_min()), 0);
  // A NaN whose top mantissa bits are zero must not become infinity.
  const uint32_t bits = 0x7f800001u;
  float nan = 0;
  std::memcpy(&nan, &bits, sizeof nan);
  EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(nan))));
  EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(nan))));
}

TEST(Dtype, ConvertsBetweenAllFloatingKindsUnaligned) {
  const std::vector<double> values = {0.0, -0.0, 1.0, -2.5, 0.15625, 1024.0};  // exact in every dtype
  const Dtype kinds[] = {Dtype::F64, Dtype::F32, Dtype::F16, Dtype::BF16};
  const auto count = static_cast<int64_t>(values.size());
  for (const Dtype from : kinds) {
    std::vector<std::byte> in(1 + values.size() * 8), out(in), back(in);
    convert(reinterpret_cast<const std::byte*>(values.data()), Dtype::F64, in.data() + 1, from, count);
    for (const Dtype to : kinds) {
      convert(in.data() + 1, from, out.data() + 1, to, count);
      convert(out.data() + 1, to, back.data() + 1, Dtype::F64, count);
      EXPECT_EQ(std::memcmp(back.data() + 1, values.data(), values.size() * 8), 0) << name(from) << name(to);
    }
  }
  int64_t integer = 1;
  float f = 0;
  EXPECT_THROW(convert(reinterpret_cast<std::byte*>(&integer), Dtype::I64, reinterpret_cast<std::byte*>(&f),
                       Dtype::F32, 1),
               BadCheckpoint);
  EXPECT_THROW(convert(reinterpret_cast<std::byte*>(&f), Dtype::F32, reinterpret_cast<std::byte*>(&integer),
                       Dtype::I64, 1),
               BadCheckpoint);
}

TEST(Dtype, BulkEqualsOneByOne) {
  std::vector<float> in;
  for (int i = -500; i < 500; ++i) in.push_back(std::ldexp(1.0f + 0.001f * static_cast<float>(i), i % 40));
  std::vector<uint16_t> half(in.size()), brain(in.size());
  std::vector<float> back(in.size());
  f32_to_f16(in, half.data());
  f32_to_bf16(in, brain.data());
  for (size_t i = 0; i < in.size(); ++i) {
    ASSERT_EQ(half[i], f32_to_f16(in[i]));
    ASSERT_EQ(brain[i], f32_to_bf16(in[i]));
  }
  f16_to_f32(half, back.data());
  for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(back[i], f16_to_f32(half[i]));
  bf16_to_f32(brain, back.data());
  for (size_t i = 0; i < in.size(); ++i) ASSERT_EQ(back[i], bf16_to_f32(brain[i]));
}

}  // namespace
}  // namespace titanium
