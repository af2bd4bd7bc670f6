// A GGUF model as a Hugging Face folder that transformers and titanium load.
#pragma once
#include <cstdint>
#include <filesystem>

#include "titanium/formats/dtype.h"

namespace titanium {

struct ConvertOptions {
  Dtype dtype = Dtype::BF16;  // or F32; quantised weights are dequantised in float and rounded once
  uint64_t max_shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;
};

struct ConvertReport {
  int64_t tensors = 0;
  uint64_t bytes = 0;  // of the tensors written
};

// Architectures llama, qwen2 and qwen3.  Writes config.json, generation_config.json, model.safetensors (or
// shards and index), tokenizer.json and tokenizer_config.json (with the chat template).  The folder is
// written under another name beside out_dir and renamed at the end, so it is there whole or not at all; an
// out_dir that holds something is refused.  Uses memory for the largest group of rows, not for the model.
//
// BadCheckpoint: the file is damaged, or has an architecture, tensor, tokenizer model, pre-tokenizer, rope
// scaling or tensor type that is not supported (named in the message).  BadConfig: options or out_dir.
ConvertReport convert_gguf(const std::filesystem::path& gguf, const std::filesystem::path& out_dir,
                           const ConvertOptions& options = {});

}  // namespace titanium
