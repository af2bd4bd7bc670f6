#include "titanium/formats/dtype.h"

#include <array>
#include <bit>
#include <cstring>

#include "titanium/base/clones.h"
#include "titanium/base/error.h"

namespace titanium {
namespace {

struct Row {
  Dtype dtype;
  const char* name;
  const char* torch;
  int64_t size;
};

constexpr std::array<Row, 13> kTable = {{
    {Dtype::F64, "F64", "float64", 8},
    {Dtype::F32, "F32", "float32", 4},
    {Dtype::F16, "F16", "float16", 2},
    {Dtype::BF16, "BF16", "bfloat16", 2},
    {Dtype::I64, "I64", "int64", 8},
    {Dtype::I32, "I32", "int32", 4},
    {Dtype::I16, "I16", "int16", 2},
    {Dtype::I8, "I8", "int8", 1},
    {Dtype::U8, "U8", "uint8", 1},
    {Dtype::U16, "U16", "uint16", 2},
    {Dtype::U32, "U32", "uint32", 4},
    {Dtype::U64, "U64", "uint64", 8},
    {Dtype::BOOL, "BOOL", "bool", 1},
}};

const Row& row(Dtype dtype) {
  const auto at = static_cast<size_t>(dtype);
  if (at >= kTable.size()) throw Bug("dtype {} does not exist", at);
  return kTable[at];
}

// To float with "round to odd": a rounding after it, to fewer bits, then gives what one rounding would have
// given (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
float to_odd_float(double x) {
  const float nearest = static_cast<float>(x);
  if (x != x || static_cast<double>(nearest) == x) return nearest;
  uint32_t bits = std::bit_cast<uint32_t>(nearest);
  const bool away = (nearest > 0) == (static_cast<double>(nearest) > x) && nearest != 0;
  if (away) --bits;  // the magnitude was rounded up: one step towards zero
  return std::bit_cast<float>(bits | 1);
}

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <typename In, typename Out, typename F>
void each(const std::byte* in, std::byte* out, int64_t count, F f) {
  for (int64_t i = 0; i < count; ++i) {
    const Out y = f(load<In>(in + i * sizeof(In)));
    std::memcpy(out + i * sizeof(Out), &y, sizeof y);
  }
}

// The conversions that whole models go through, as loops that the compiler vectorises for the machine at
// hand.
TITANIUM_CLONES void narrow_to_bf16(const std::byte* in, std::byte* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, in + 4 * i, 4);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, quiet = (bits >> 16) | 0x0040u;
    const auto y = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
    std::memcpy(out + 2 * i, &y, 2);
  }
}

TITANIUM_CLONES void widen_bf16(const std::byte* in, std::byte* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, in + 2 * i, 2);
    const uint32_t y = static_cast<uint32_t>(bits) << 16;
    std::memcpy(out + 4 * i, &y, 4);
  }
}

// Every floating dtype reaches the others through a wider one of the machine.
template <typename In, typename Wide, typename Widen>
void convert_from(const std::byte* in, std::byte* out, Dtype to, int64_t count, Widen widen) {
  const auto narrow = [&](In x) -> float {
    if constexpr (std::is_same_v<Wide, double>) {
      return to_odd_float(widen(x));
    } else {
      return widen(x);
    }
  };
  switch (to) {
    case Dtype::F64:
      return each<In, double>(in, out, count, [&](In x) { return double(widen(x)); });
    case Dtype::F32:
      return each<In, float>(in, out, count, [&](In x) { return float(widen(x)); });
    case Dtype::F16:
      return each<In, uint16_t>(in, out, count, [&](In x) { return f32_to_f16(narrow(x)); });
    case Dtype::BF16:
      return each<In, uint16_t>(in, out, count, [&](In x) { return f32_to_bf16(narrow(x)); });
    default:
      throw BadCheckpoint("cannot convert to dtype {} (allowed: F64, F32, F16, BF16)", name(to));
  }
}

}  // namespace

int64_t size_of(Dtype dtype) {
  return row(dtype).size;
}
const char* name(Dtype dtype) {
  return row(dtype).name;
}
const char* torch_name(Dtype dtype) {
  return row(dtype).torch;
}

bool is_floating(Dtype dtype) {
  return dtype == Dtype::F64 || dtype == Dtype::F32 || dtype == Dtype::F16 || dtype == Dtype::BF16;
}

std::optional<Dtype> parse_dtype(std::string_view text) {
  for (const Row& row : kTable) {
    if (text == row.name || text == row.torch) return row.dtype;
  }
  return std::nullopt;
}

uint16_t f32_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

uint16_t f32_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu));
  if (magnitude >= 0x47800000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 2^16 and more
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is a multiple of 2^-24, which is the last place of 0.5f: the addition rounds for
    // us.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f)));
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23)) >> 13));
}

float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t biased = exponent == 0x1f ? 0xffu : exponent + 112u;
  return std::bit_cast<float>(sign | (biased << 23) | (mantissa << 13));
}

void f32_to_bf16(std::span<const float> in, uint16_t* out) {
  narrow_to_bf16(std::as_bytes(in).data(), reinterpret_cast<std::byte*>(out),
                 static_cast<int64_t>(in.size()));
}

void f32_to_f16(std::span<const float> in, uint16_t* out) {
  for (size_t i = 0; i < in.size(); ++i) out[i] = f32_to_f16(in[i]);
}

void bf16_to_f32(std::span<const uint16_t> in, float* out) {
  widen_bf16(std::as_bytes(in).data(), reinterpret_cast<std::byte*>(out), static_cast<int64_t>(in.size()));
}

void f16_to_f32(std::span<const uint16_t> in, float* out) {
  for (size_t i = 0; i < in.size(); ++i) out[i] = f16_to_f32(in[i]);
}

void convert(const std::byte* in, Dtype from, std::byte* out, Dtype to, int64_t count) {
  if (from == to && is_floating(from)) {
    if (count > 0) std::memcpy(out, in, static_cast<size_t>(count * size_of(from)));
    return;
  }
  if (from == Dtype::F32 && to == Dtype::BF16) return narrow_to_bf16(in, out, count);
  if (from == Dtype::BF16 && to == Dtype::F32) return widen_bf16(in, out, count);
  switch (from) {
    case Dtype::F64:
      return convert_from<double, double>(in, out, to, count, [](double x) { return x; });
    case Dtype::F32:
      return convert_from<float, float>(in, out, to, count, [](float x) { return x; });
    case Dtype::F16:
      return convert_from<uint16_t, float>(in, out, to, count, [](uint16_t x) { return f16_to_f32(x); });
    case Dtype::BF16:
      return convert_from<uint16_t, float>(in, out, to, count, [](uint16_t x) { return bf16_to_f32(x); });
    default:
      throw BadCheckpoint("cannot convert from dtype {} (allowed: F64, F32, F16, BF16)", name(from));
  }
}

}  // namespace titanium
