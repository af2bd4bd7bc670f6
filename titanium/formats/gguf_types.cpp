#include "titanium/formats/gguf_types.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>

#include "titanium/base/error.h"
#include "titanium/formats/dtype.h"
#include "titanium/formats/gguf.h"

namespace titanium {
namespace {

constexpr int64_t kBlock = 32;  // elements of a quantised block

template <typename T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

float load_half(const std::byte* at) {
  return f16_to_f32(load<uint16_t>(at));
}

// Block layouts: 16-bit float scale (Q4_1: and minimum), then the quants; 4-bit quants hold elements 0..15 in
// the low and 16..31 in the high halves of 16 bytes.
// https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
void dequantize_q8_0(const std::byte* in, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b, in += 34, out += kBlock) {
    const float scale = load_half(in);
    for (int i = 0; i < kBlock; ++i) out[i] = static_cast<float>(static_cast<int8_t>(in[2 + i])) * scale;
  }
}

void dequantize_q4_0(const std::byte* in, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b, in += 18, out += kBlock) {
    const float scale = load_half(in);
    for (int i = 0; i < kBlock / 2; ++i) {
      const int byte = static_cast<int>(in[2 + i]);
      out[i] = static_cast<float>((byte & 15) - 8) * scale;
      out[i + kBlock / 2] = static_cast<float>((byte >> 4) - 8) * scale;
    }
  }
}

void dequantize_q4_1(const std::byte* in, int64_t blocks, float* out) {
  for (int64_t b = 0; b < blocks; ++b, in += 20, out += kBlock) {
    const float scale = load_half(in), least = load_half(in + 2);
    for (int i = 0; i < kBlock / 2; ++i) {
      const int byte = static_cast<int>(in[4 + i]);
      out[i] = static_cast<float>(byte & 15) * scale + least;
      out[i + kBlock / 2] = static_cast<float>(byte >> 4) * scale + least;
    }
  }
}

}  // namespace

std::optional<BlockLayout> block_layout(uint32_t ggml_type) {
  switch (static_cast<GgmlType>(ggml_type)) {
    case GgmlType::F32:
      return BlockLayout{1, 4};
    case GgmlType::F16:
    case GgmlType::BF16:
      return BlockLayout{1, 2};
    case GgmlType::Q8_0:
      return BlockLayout{kBlock, 34};
    case GgmlType::Q4_0:
      return BlockLayout{kBlock, 18};
    case GgmlType::Q4_1:
      return BlockLayout{kBlock, 20};
  }
  return std::nullopt;
}

std::string ggml_type_name(uint32_t ggml_type) {
  static constexpr std::array<const char*, 40> kNames = {
      "F32",      "F16",      "Q4_0",    "Q4_1",  "Q4_2",       "Q4_3",       "Q5_0",       "Q5_1",
      "Q8_0",     "Q8_1",     "Q2_K",    "Q3_K",  "Q4_K",       "Q5_K",       "Q6_K",       "Q8_K",
      "IQ2_XXS",  "IQ2_XS",   "IQ3_XXS", "IQ1_S", "IQ4_NL",     "IQ3_S",      "IQ2_S",      "IQ4_XS",
      "I8",       "I16",      "I32",     "I64",   "F64",        "IQ1_M",      "BF16",       "Q4_0_4_4",
      "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",   "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4"};
  return ggml_type < kNames.size() ? kNames[ggml_type] : fmt::format("number {}", ggml_type);
}

const char* name(GgmlType type) {
  switch (type) {
    case GgmlType::F32:
      return "F32";
    case GgmlType::F16:
      return "F16";
    case GgmlType::BF16:
      return "BF16";
    case GgmlType::Q8_0:
      return "Q8_0";
    case GgmlType::Q4_0:
      return "Q4_0";
    case GgmlType::Q4_1:
      return "Q4_1";
  }
  return "unknown";
}

int64_t GgufTensor::columns() const {
  return shape.empty() ? 1 : shape.back();
}

int64_t GgufTensor::rows() const {
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  return rows;
}

void GgufTensor::dequantize(int64_t begin, int64_t end, float* out) const {
  if (begin < 0 || begin > end || end > rows()) {
    throw BadCheckpoint("tensor '{}': rows {} to {} of {}", name, begin, end, rows());
  }
  const auto layout = block_layout(static_cast<uint32_t>(type));
  if (!layout) throw Bug("tensor '{}' has a type that was not checked", name);
  const int64_t row_blocks = columns() / layout->elements;
  const int64_t blocks = (end - begin) * row_blocks;
  const std::byte* in = data + begin * row_blocks * layout->bytes;
  const auto to_floats = [&](Dtype from) {
    convert(in, from, reinterpret_cast<std::byte*>(out), Dtype::F32, blocks);
  };
  switch (type) {
    case GgmlType::F32:
      return to_floats(Dtype::F32);
    case GgmlType::F16:
      return to_floats(Dtype::F16);
    case GgmlType::BF16:
      return to_floats(Dtype::BF16);
    case GgmlType::Q8_0:
      return dequantize_q8_0(in, blocks, out);
    case GgmlType::Q4_0:
      return dequantize_q4_0(in, blocks, out);
    case GgmlType::Q4_1:
      return dequantize_q4_1(in, blocks, out);
  }
}

}  // namespace titanium
