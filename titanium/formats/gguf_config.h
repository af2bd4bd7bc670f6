// What a GGUF model is in Hugging Face's terms: its config.json, and which tensor becomes which.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "titanium/formats/gguf.h"
#include "titanium/formats/json.h"

namespace titanium {

struct TensorMove {
  const GgufTensor* from = nullptr;
  std::string name;  // Hugging Face's
  int64_t heads =
      0;  // not 0: rows are in the interleaved rope layout, in this many heads, and go back to half-split
};

struct GgufModel {
  Json config;             // config.json without torch_dtype
  Json generation_config;  // generation_config.json
  int64_t vocab_size = 0;  // rows of the embedding
  int64_t context_length = 0;
  std::vector<TensorMove> moves;  // in the order of the model; tensors of `file`
};

// Every tensor of the file is used or refused, with its shape checked.  BadCheckpoint names the key or
// tensor.
GgufModel describe_gguf(const GgufFile& file);

}  // namespace titanium
