#include "titanium/text/chat_mask.h"

#include <algorithm>

#include "titanium/base/error.h"

namespace titanium {
namespace {

bool white(char c) {
  return c == ' ' || c == '\n' || c == '\r' || c == '\t';
}

std::string content_of(const ChatJson& message) {
  const auto found = message.find("content");
  if (found == message.end() || found->is_null()) return "";
  if (found->is_string()) return found->get<std::string>();
  return "";
}

// Finds the spans of assistant turns where the template does not mark them.
class Spans {
 public:
  Spans(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const ChatInput& input,
        const ChatMaskPolicy& policy, std::string_view sample)
      : tokenizer_(tokenizer), template_(chat_template), input_(input), policy_(policy), sample_(sample) {
    input_.add_generation_prompt = input.add_generation_prompt;
    whole_ = template_.render(input_).text;
  }

  std::vector<ByteSpan> find() {
    std::vector<ByteSpan> spans;
    const auto count = static_cast<int64_t>(input_.messages.size());
    int64_t last = -1;
    for (int64_t i = 0; i < count; ++i)
      if (role(i) == "assistant") last = i;
    for (int64_t i = 0; i < count; ++i) {
      if (role(i) != "assistant" || (policy_.last_turn_only && i != last)) continue;
      spans.push_back(turn(i));
      if (spans.size() > 1 && spans.back().begin < spans[spans.size() - 2].end)
        fail(i, "it overlaps the turn before it");
    }
    return spans;
  }

 private:
  std::string role(int64_t i) const {
    const ChatJson& message = input_.messages[static_cast<size_t>(i)];
    return message.is_object() ? message.value("role", "") : "";
  }

  [[noreturn]] void fail(int64_t turn, std::string_view why) const {
    throw BadData(
        "{}: messages[{}] (assistant): its tokens cannot be told from the rest: {}; the chat template needs "
        "{{% generation %}} marks",
        sample_, turn, why);
  }

  // The first `count` messages alone; empty where the template refuses them.
  std::optional<std::string> first(int64_t count, bool prompt) const {
    ChatInput part = input_;
    part.messages = ChatJson::array();
    for (int64_t i = 0; i < count; ++i) part.messages.push_back(input_.messages[static_cast<size_t>(i)]);
    part.add_generation_prompt = prompt;
    try {
      return template_.render(part).text;
    } catch (const BadData&) {
      return std::nullopt;
    }
  }

  ByteSpan turn(int64_t i) const {
    const std::optional<std::string> through = first(i + 1, false);
    if (!through || !whole_.starts_with(*through))
      fail(i, "what is rendered of it depends on later messages");
    const size_t begin = begin_of(i, *through);
    const std::string_view text = std::string_view(*through).substr(begin);
    const std::string content = content_of(input_.messages[static_cast<size_t>(i)]);
    // Templates may strip the ends of a content, never change what is between.
    std::string_view core = content;
    while (!core.empty() && white(core.front())) core.remove_prefix(1);
    while (!core.empty() && white(core.back())) core.remove_suffix(1);
    if (text.find(core) == std::string_view::npos) fail(i, "the template rewrites or drops its content");
    return {static_cast<int64_t>(begin), static_cast<int64_t>(begin + learned(text))};
  }

  // Where the header ends: after what the template asks an assistant to go on from.
  size_t begin_of(int64_t i, const std::string& through) const {
    if (const auto prompt = first(i, true); prompt && !prompt->empty() && through.starts_with(*prompt)) {
      // Only if the prompt is more than the messages before it: else the header would be learned.
      const auto before = first(i, false);
      if (before && before->size() < prompt->size()) return prompt->size();
    }
    // Where another content begins to differ.
    ChatInput other = input_;
    other.messages = ChatJson::array();
    for (int64_t j = 0; j <= i; ++j) other.messages.push_back(input_.messages[static_cast<size_t>(j)]);
    const std::string mark = "\x01titanium\x01";
    ChatJson& message = other.messages[static_cast<size_t>(i)];
    message["content"] = mark;
    other.add_generation_prompt = false;
    std::string marked;
    try {
      marked = template_.render(other).text;
    } catch (const BadData&) {
      fail(i, "the template refuses another content");
    }
    const size_t at = marked.find(mark);
    if (at == std::string::npos || through.compare(0, at, marked, 0, at) != 0)
      fail(i, "its start depends on its content");
    return at;
  }

  // Without the white space after the end-of-turn token.
  size_t learned(std::string_view text) const {
    if (policy_.trailing_newline) return text.size();
    size_t end = text.size();
    while (end > 0 && white(text[end - 1])) --end;
    for (const auto& id : {tokenizer_.special().eos}) {
      const std::string token = tokenizer_.special_text(id);
      if (!token.empty() && text.substr(0, end).ends_with(token)) return end;
    }
    const Encoding encoding = tokenizer_.encode(text.substr(0, end));
    return !encoding.ids.empty() && tokenizer_.is_special(encoding.ids.back()) ? end : text.size();
  }

  const Tokenizer& tokenizer_;
  const ChatTemplate& template_;
  ChatInput input_;
  const ChatMaskPolicy& policy_;
  std::string_view sample_;
  std::string whole_;
};

MaskedTokens masked(const Encoding& encoding, const std::vector<ByteSpan>& spans) {
  MaskedTokens out;
  out.ids = encoding.ids;
  out.dropped_bytes = encoding.dropped_bytes;
  out.loss_mask.assign(out.ids.size(), 0);
  size_t span = 0;
  for (size_t i = 0; i < out.ids.size(); ++i) {
    const ByteSpan& token = encoding.spans[i];
    while (span < spans.size() && spans[span].end <= token.begin && spans[span].end < token.end) ++span;
    if (span == spans.size()) break;
    out.loss_mask[i] =
        token.begin < token.end && token.begin >= spans[span].begin && token.end <= spans[span].end;
  }
  return out;
}

void append_eos(const Tokenizer& tokenizer, const TextPolicy& policy, MaskedTokens& tokens) {
  if (!policy.append_eos) return;
  const auto eos = tokenizer.special().eos;
  if (!eos) throw BadConfig("data.add_eos: the tokenizer names no EOS token");
  if (!tokens.ids.empty() && tokens.ids.back() == *eos) {
    tokens.loss_mask.back() = 1;
    return;
  }
  tokens.ids.push_back(*eos);
  tokens.loss_mask.push_back(1);
}

}  // namespace

std::vector<ByteSpan> assistant_spans(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                                      const ChatInput& input, const ChatMaskPolicy& policy,
                                      std::string_view sample) {
  if (chat_template.marks_generation()) {
    std::vector<ByteSpan> spans = chat_template.render(input).generation;
    if (policy.last_turn_only && spans.size() > 1) spans = {spans.back()};
    return spans;
  }
  return Spans(tokenizer, chat_template, input, policy, sample).find();
}

MaskedTokens tokenize_chat(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                           const ChatInput& input, const ChatMaskPolicy& policy, std::string_view sample) {
  const std::vector<ByteSpan> spans = assistant_spans(tokenizer, chat_template, input, policy, sample);
  return masked(tokenizer.encode(chat_template.render(input).text), spans);
}

MaskedTokens tokenize_text(const Tokenizer& tokenizer, std::string_view text, const TextPolicy& policy) {
  const Encoding encoding = tokenizer.encode(text, /*add_special_tokens=*/true);
  MaskedTokens out = masked(encoding, {{0, static_cast<int64_t>(text.size())}});
  append_eos(tokenizer, policy, out);
  return out;
}

MaskedTokens tokenize_prompt_response(const Tokenizer& tokenizer, std::string_view prompt,
                                      std::string_view response, const TextPolicy& policy) {
  const std::string whole = std::string(prompt) + std::string(response);
  const Encoding encoding = tokenizer.encode(whole, /*add_special_tokens=*/true);
  MaskedTokens out =
      masked(encoding, {{static_cast<int64_t>(prompt.size()), static_cast<int64_t>(whole.size())}});
  append_eos(tokenizer, policy, out);
  return out;
}

}  // namespace titanium
