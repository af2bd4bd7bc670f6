// ggml's tensor types: their names, and the block layout of those that we read.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace titanium {

struct BlockLayout {
  int64_t elements;  // in one block, along the last dimension
  int64_t bytes;     // of one block
};

std::optional<BlockLayout> block_layout(uint32_t ggml_type);  // empty for a type that is not supported
std::string ggml_type_name(uint32_t ggml_type);  // "Q4_K", or "number 99" for one that is unknown

}  // namespace titanium
