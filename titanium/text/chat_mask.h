// From records to tokens with a loss mask.  A record is rendered and tokenised as a whole, once; the mask
// comes from byte spans, so the ids are those that inference sees.  loss_mask[i] says whether token i is to
// be learned, that is whether it is a target: the shift by one is made where labels are made.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/text/chat_template.h"
#include "titanium/text/tokenizer.h"

namespace titanium {

struct MaskedTokens {
  std::vector<int64_t> ids;        // [N]
  std::vector<uint8_t> loss_mask;  // [N], 1 where the token is learned
  int64_t dropped_bytes = 0;       // see Encoding
};

struct ChatMaskPolicy {
  bool trailing_newline = false;  // also learn the whitespace after the end-of-turn token, as verl does
  bool last_turn_only = false;    // learn the last assistant turn only
};

// Learned: what an assistant writes after its header (the generation prompt) up to and with the end-of-turn
// token: its content, and its reasoning and tool calls where the template shows them.  A token that straddles
// the edge of a learned span is not learned.  Where the template has {% generation %} blocks they are the
// spans; else the spans are derived: the header ends where the render of the messages before, with the
// generation prompt, ends; the turn ends where the render of the messages up to it ends; both must be a
// prefix of the whole byte for byte.  Where one is not, a second render with another content shows where the
// content stands.  BadData names `sample` (for example "data.jsonl:12") and the turn where neither holds, or
// where the template rewrites or drops content, reasoning or a tool call.  The template alone decides on BOS.
MaskedTokens tokenize_chat(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                           const ChatInput& input, const ChatMaskPolicy& policy, std::string_view sample);

// Byte spans that tokenize_chat learns, in the text render() gives.
std::vector<ByteSpan> assistant_spans(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                                      const ChatInput& input, const ChatMaskPolicy& policy,
                                      std::string_view sample);

struct TextPolicy {
  bool append_eos =
      true;  // BadConfig if the tokenizer names no EOS.  Not doubled if the text already ends in it.
};

// BOS by the tokenizer's rule, then the text, then EOS; all but BOS is learned.
MaskedTokens tokenize_text(const Tokenizer& tokenizer, std::string_view text, const TextPolicy& policy = {});

// prompt + response as one text; response and EOS are learned, a token that straddles the border is not.
MaskedTokens tokenize_prompt_response(const Tokenizer& tokenizer, std::string_view prompt,
                                      std::string_view response, const TextPolicy& policy = {});

}  // namespace titanium
