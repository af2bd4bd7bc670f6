// The tokenizer inside a GGUF file, as Hugging Face's files.
#pragma once
#include <cstdint>
#include <string>

#include "titanium/formats/gguf.h"
#include "titanium/formats/json.h"

namespace titanium {

struct HfTokenizer {
  std::string tokenizer_json;  // the text of tokenizer.json
  Json tokenizer_config;       // tokenizer_config.json, with the chat template
};

// Byte-level BPE ("gpt2") with the pre-tokenizers smollm, llama-bpe, qwen2 and gpt-2.  BadCheckpoint names
// what else the file asks for, or the token or merge that is wrong.
HfTokenizer describe_tokenizer(const GgufFile& file, int64_t vocab_size, int64_t context_length);

}  // namespace titanium
