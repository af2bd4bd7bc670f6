#include "titanium/data/encode.h"

#include <utility>

namespace titanium {
namespace {

MaskedTokens tokenize(const Encoder& encoder, const Record& record, const std::string& where) {
  if (!encoder.tokenizer) {
    throw BadConfig("{}: a record of text needs a tokenizer, and the model's folder has none", where);
  }
  const Tokenizer& tokenizer = *encoder.tokenizer;
  const TextPolicy text{.append_eos = encoder.append_eos};
  if (record.form == RecordForm::kText) return tokenize_text(tokenizer, record.text, text);
  if (record.messages.empty()) {
    return tokenize_prompt_response(tokenizer, record.prompt, record.response, text);
  }
  if (!encoder.chat_template) {
    throw BadConfig("{}: a record of messages needs a chat template, and the model's folder has none", where);
  }
  ChatInput input;
  input.messages = record.messages;
  input.tools = record.tools;
  input.variables = encoder.template_variables;
  input.bos_token = tokenizer.special_text(tokenizer.special().bos);
  input.eos_token = tokenizer.special_text(tokenizer.special().eos);
  if (input.tools.is_array() && !input.tools.empty()) {
    ChatInput without = input;
    without.tools = nullptr;
    if (encoder.chat_template->render(input).text == encoder.chat_template->render(without).text)
      throw BadData("{}: field 'tools': the chat template does not show them", where);
  }
  ChatMaskPolicy policy = encoder.mask;
  if (record.form == RecordForm::kPromptResponse) policy.last_turn_only = true;
  return tokenize_chat(tokenizer, *encoder.chat_template, input, policy, where);
}

}  // namespace

EncodedRecord Encoder::encode(Record record, const std::string& where) const {
  EncodedRecord out;
  if (record.form == RecordForm::kInputIds) {
    out.ids = std::move(record.ids);
    out.loss_mask = std::move(record.loss_mask);
  } else {
    MaskedTokens tokens;
    try {
      tokens = tokenize(*this, record, where);
    } catch (const BadData& e) {
      const std::string message = e.what();
      throw BadRecord(Reject::kText,
                      message.starts_with(where) ? message : fmt::format("{}: {}", where, message));
    }
    out.ids.reserve(tokens.ids.size());
    for (int64_t id : tokens.ids) {
      if (id < 0 || id >= vocab_size) {
        throw BadRecord(Reject::kText,
                        fmt::format("{}: the tokenizer gives id {}, but the model's vocabulary is [0, {})",
                                    where, id, vocab_size));
      }
      out.ids.push_back(static_cast<int32_t>(id));
    }
    out.loss_mask = std::move(tokens.loss_mask);
    out.dropped_bytes = tokens.dropped_bytes;
  }
  if (out.ids.empty()) throw BadRecord(Reject::kEmpty, fmt::format("{}: the record has no tokens", where));
  return out;
}

}  // namespace titanium
