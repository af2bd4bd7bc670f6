// Any bytes as a GGUF file: it opens or is refused; every tensor of what opens can be dequantised, and its
// model and tokenizer can be described or are refused.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/formats/gguf.h"
#include "titanium/formats/gguf_config.h"
#include "titanium/formats/gguf_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto file =
        titanium::GgufFile::from_bytes({reinterpret_cast<const std::byte*>(data), size}, "fuzz");
    for (const auto& tensor : file.tensors()) {
      std::vector<float> row(static_cast<size_t>(tensor.columns()));
      for (int64_t i = 0; i < tensor.rows(); ++i) tensor.dequantize(i, i + 1, row.data());
    }
    try {
      titanium::describe_gguf(file);
    } catch (const titanium::BadCheckpoint&) {
    }
    titanium::describe_tokenizer(file, 1 << 20, 512);
  } catch (const titanium::BadCheckpoint&) {
  }
  return 0;
}
