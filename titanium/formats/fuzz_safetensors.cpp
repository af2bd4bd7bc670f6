// Any bytes as a safetensors file: it opens or is refused; what opens can be read to the last byte.
#include <cstdint>
#include <numeric>

#include "titanium/base/error.h"
#include "titanium/formats/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto file =
        titanium::SafetensorsFile::from_bytes({reinterpret_cast<const std::byte*>(data), size}, "fuzz");
    uint64_t total = 0;
    volatile unsigned sink = 0;
    for (const auto& tensor : file.tensors()) {
      for (uint64_t i = 0; i < tensor.nbytes; ++i) sink = sink + static_cast<unsigned>(tensor.data[i]);
      if (&file.at(tensor.name) != &tensor) __builtin_trap();
      if (!tensor.shape.empty()) tensor.rows(tensor.shape[0] / 2, tensor.shape[0]);
      total += tensor.nbytes;
    }
    if (total > size) __builtin_trap();
  } catch (const titanium::BadCheckpoint&) {
  }
  return 0;
}
