// Element types of tensors on disk, and conversions between the floating-point ones.  No torch here.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

namespace titanium {

enum class Dtype : uint8_t { F64, F32, F16, BF16, I64, I32, I16, I8, U8, U16, U32, U64, BOOL };

int64_t size_of(Dtype dtype);         // bytes of one element
const char* name(Dtype dtype);        // safetensors' spelling: "F32", "BF16", "BOOL", ...
bool is_floating(Dtype dtype);        // F64, F32, F16, BF16
const char* torch_name(Dtype dtype);  // "float32", "bfloat16", ...: config.json's spelling

std::optional<Dtype> parse_dtype(
    std::string_view text);  // safetensors' or torch's spelling; empty when unknown

// Round to nearest, ties to even.  Overflow gives infinity; a NaN stays a NaN (quiet, sign and top bits
// kept).
uint16_t f32_to_bf16(float x);
uint16_t f32_to_f16(float x);
float bf16_to_f32(uint16_t bits);
float f16_to_f32(uint16_t bits);

void f32_to_bf16(std::span<const float> in, uint16_t* out);
void f32_to_f16(std::span<const float> in, uint16_t* out);
void bf16_to_f32(std::span<const uint16_t> in, float* out);
void f16_to_f32(std::span<const uint16_t> in, float* out);

// `count` elements from one floating dtype to another.  Neither side need be aligned (tensors of a
// safetensors file may start anywhere); they must not overlap.  F64 to F16 or BF16 rounds once. BadCheckpoint
// for other dtypes.
void convert(const std::byte* in, Dtype from, std::byte* out, Dtype to, int64_t count);

}  // namespace titanium
