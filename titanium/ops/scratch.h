// Memory of buffers that live for the length of an op and are large: packed operands of products, logits.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace titanium {

constexpr int64_t kLeastScratch = 64 << 10;  // bytes; smaller ones are malloc's
constexpr int64_t kKeptScratch = 32 << 20;   // bytes; larger ones go back to the system at once

// [n] of any content.  When the last tensor that shares it is gone, it serves the next op that asks for at
// most as much.  From malloc such buffers would lie between activations that outlive them, and the holes that
// they leave take part in the peak.  No more buffers are kept than were in use at once.
at::Tensor scratch(int64_t n, at::ScalarType dtype);

// Bytes that are kept at the moment and serve nobody.
int64_t idle_scratch_bytes();

}  // namespace titanium
