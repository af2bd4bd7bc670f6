// From a record to its tokens.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "titanium/data/record.h"
#include "titanium/text/chat_mask.h"
#include "titanium/text/chat_template.h"
#include "titanium/text/tokenizer.h"

namespace titanium {

struct EncodedRecord {
  std::vector<int32_t> ids;        // [n]
  std::vector<uint8_t> loss_mask;  // [n]
  int64_t dropped_bytes = 0;       // see Encoding
};

// Thread-safe.  Keeps references.
struct Encoder {
  const Tokenizer* tokenizer = nullptr;         // may be null for input_ids
  const ChatTemplate* chat_template = nullptr;  // may be null for records without messages
  bool append_eos = true;
  ChatMaskPolicy mask;
  ChatJson template_variables = ChatJson::object();
  int64_t vocab_size = 0;

  // BadRecord: the text is refused, there are no tokens, or an id is not in [0, vocab_size).  BadConfig: the
  // record needs a tokenizer or a template that is not there, or they do not support what it needs.
  EncodedRecord encode(Record record, const std::string& where) const;
};

}  // namespace titanium
