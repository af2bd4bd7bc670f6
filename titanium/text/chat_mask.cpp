#include "titanium/text/chat_mask.h"

#include <algorithm>
#include <optional>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr std::string_view kWhite = " \t\r\n\f\v";

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kWhite);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kWhite) - first + 1);
}

bool blank(std::string_view text) {
  return trimmed(text).empty();
}

std::string_view field(const ChatJson& message, const char* key) {
  const auto found = message.find(key);
  if (found == message.end() || !found->is_string()) return {};
  return found->get_ref<const std::string&>();
}

// A stretch of a rendered text.
struct Stretch {
  size_t begin, end;
};

// Finds the spans of assistant turns where the template does not mark them.
class SpanFinder {
 public:
  SpanFinder(const Tokenizer& tokenizer, const ChatTemplate& chat_template, const ChatInput& input,
             const ChatMaskPolicy& policy, std::string_view sample, const std::string& whole)
      : tokenizer_(tokenizer),
        template_(chat_template),
        input_(input),
        policy_(policy),
        sample_(sample),
        whole_(whole) {
    std::vector<int64_t> stop = tokenizer.special().stop;
    if (tokenizer.special().eos) stop.push_back(*tokenizer.special().eos);
    for (const int64_t id : stop)
      if (tokenizer.is_token(id) && !tokenizer.token_bytes(id).empty())
        stops_.push_back(tokenizer.token_bytes(id));
  }

  std::vector<ByteSpan> run() const {
    std::vector<size_t> turns;
    for (size_t i = 0; i < input_.messages.size(); ++i)
      if (field(input_.messages[i], "role") == "assistant") turns.push_back(i);
    if (policy_.last_turn_only && turns.size() > 1) turns = {turns.back()};
    std::vector<ByteSpan> spans;
    for (const size_t i : turns) {
      const Stretch turn = find(i);
      if (!spans.empty() && static_cast<int64_t>(turn.begin) < spans.back().end)
        fail(i, "it overlaps the turn before it");
      spans.push_back({static_cast<int64_t>(turn.begin), static_cast<int64_t>(turn.end)});
    }
    return spans;
  }

 private:
  [[noreturn]] void fail(size_t turn, std::string_view why) const {
    throw BadData(
        "{}: messages[{}] (assistant): what is to be learned cannot be told from the rest: {}.  A template "
        "with "
        "{{% generation %}} marks can say it; learning the last turn only avoids what templates do to "
        "earlier turns",
        sample_, turn, why);
  }

  // A render of the first `count` messages; empty where the template refuses them or they do not begin the
  // whole.
  std::optional<size_t> prefix(size_t count, bool prompt) const {
    if (count == 0 && !prompt) return 0;
    ChatInput part = input_;
    part.messages =
        ChatJson(input_.messages.begin(), input_.messages.begin() + static_cast<std::ptrdiff_t>(count));
    if (count == 0) part.messages = ChatJson::array();
    part.add_generation_prompt = prompt;
    const std::optional<std::string> text = render(part);
    if (!text || !whole_.starts_with(*text)) return std::nullopt;
    return text->size();
  }

  std::optional<std::string> render(const ChatInput& input) const {
    try {
      return template_.render(input).text;
    } catch (const BadData&) {
      return std::nullopt;
    }
  }

  // Where the content of message i stands, found by rendering another content in its place.  Empty unless all
  // else stays the same byte for byte and the content is there, at most stripped.
  std::optional<Stretch> content(size_t i) const {
    const ChatJson& message = input_.messages[i];
    const auto found = message.find("content");
    if (found == message.end() || !found->is_string()) return std::nullopt;
    std::string mark = "7f3a9c51e2d84b06";
    while (whole_.find(mark) != std::string::npos) mark += "x";
    ChatInput other = input_;
    other.messages[i]["content"] = mark;
    const std::optional<std::string> text = render(other);
    if (!text) return std::nullopt;
    const size_t at = text->find(mark);
    if (at == std::string::npos || text->find(mark, at + 1) != std::string::npos) return std::nullopt;
    const std::string_view before = std::string_view(*text).substr(0, at);
    const std::string_view after = std::string_view(*text).substr(at + mark.size());
    if (before.size() + after.size() > whole_.size() || !whole_.starts_with(before) ||
        !whole_.ends_with(after))
      return std::nullopt;
    const Stretch out{before.size(), whole_.size() - after.size()};
    const std::string_view shown = std::string_view(whole_).substr(out.begin, out.end - out.begin);
    const std::string_view given = field(message, "content");
    const size_t at_given = given.find(shown);
    if (trimmed(shown) != trimmed(given) || at_given == std::string_view::npos) return std::nullopt;
    return out;
  }

  Stretch find(size_t i) const {
    const std::optional<Stretch> shown = content(i);
    const size_t begin = begin_of(i, shown);
    const size_t end = end_of(i, begin, shown);
    check(i, std::string_view(whole_).substr(begin, end - begin));
    return {begin, end};
  }

  size_t begin_of(size_t i, const std::optional<Stretch>& shown) const {
    const std::optional<size_t> before = prefix(i, false), prompt = prefix(i, true);
    // A template without a generation prompt adds nothing, and then the header is still to come.
    if (prompt && prompt != before && (!shown || *prompt <= shown->begin)) return *prompt;
    if (!shown)
      fail(i,
           "the template has no generation prompt that its text goes on from, and its content is not found");
    const bool only_space = before && *before <= shown->begin &&
                            blank(std::string_view(whole_).substr(*before, shown->begin - *before));
    return only_space ? *before : shown->begin;
  }

  size_t end_of(size_t i, size_t begin, const std::optional<Stretch>& shown) const {
    const bool last = i + 1 == input_.messages.size() && !input_.add_generation_prompt;
    const std::optional<size_t> through = last ? whole_.size() : prefix(i + 1, false);
    if (through && *through >= (shown ? shown->end : begin)) {
      const std::string_view turn = std::string_view(whole_).substr(begin, *through - begin);
      const size_t tail = turn.find_last_not_of(kWhite) + 1;  // 0 if all is blank
      if (policy_.trailing_newline || !ends_in_special(turn.substr(0, tail))) return *through;
      return begin + tail;
    }
    // The end-of-turn token that comes first after the content.  Without the content it must not be in what
    // was given.
    if (!shown && mentions_stop(input_.messages[i]))
      fail(i,
           "the render of the messages up to it is not the start of the whole, and it holds an end-of-turn "
           "token");
    const size_t from = shown ? shown->end : begin;
    size_t end = std::string::npos;
    for (const std::string& stop : stops_) {
      const size_t at = whole_.find(stop, from);
      if (at != std::string::npos) end = std::min(end, at + stop.size());
    }
    if (end == std::string::npos) fail(i, "no end-of-turn token of the tokenizer comes after it");
    if (i + 1 < input_.messages.size()) {
      const std::optional<Stretch> next = content(i + 1);
      if (!next || next->begin < end)
        fail(i, "it is not clear that its end-of-turn token comes before the next message");
    }
    while (policy_.trailing_newline && end < whole_.size() &&
           kWhite.find(whole_[end]) != std::string_view::npos)
      ++end;
    return end;
  }

  bool ends_in_special(std::string_view text) const {
    for (const std::string& stop : stops_)
      if (text.ends_with(stop)) return true;
    const Encoding encoding = tokenizer_.encode(text);
    return !encoding.ids.empty() && tokenizer_.is_special(encoding.ids.back());
  }

  bool mentions_stop(const ChatJson& value) const {
    if (value.is_string()) {
      const auto& text = value.get_ref<const std::string&>();
      return std::any_of(stops_.begin(), stops_.end(),
                         [&](const std::string& stop) { return text.find(stop) != std::string::npos; });
    }
    return value.is_structured() && std::any_of(value.begin(), value.end(),
                                                [&](const ChatJson& inner) { return mentions_stop(inner); });
  }

  // All that the message says must be in the turn.
  void check(size_t i, std::string_view turn) const {
    const ChatJson& message = input_.messages[i];
    auto holds = [&](std::string_view part) { return turn.find(trimmed(part)) != std::string_view::npos; };
    if (!holds(field(message, "content"))) fail(i, "the template rewrites or drops its content");
    for (const char* key : {"reasoning_content", "thinking", "reasoning"})
      if (!holds(field(message, key))) fail(i, "the template drops its reasoning");
    const auto calls = message.find("tool_calls");
    if (calls == message.end() || !calls->is_array()) return;
    for (const ChatJson& call : *calls) {
      if (!call.is_object()) continue;
      const auto function = call.find("function");
      if (!holds(field(function != call.end() && function->is_object() ? *function : call, "name")))
        fail(i, "the template drops a tool call");
    }
  }

  const Tokenizer& tokenizer_;
  const ChatTemplate& template_;
  const ChatInput& input_;
  const ChatMaskPolicy& policy_;
  std::string_view sample_;
  const std::string& whole_;
  std::vector<std::string> stops_;
};

std::vector<ByteSpan> spans_of(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                               const ChatInput& input, const ChatMaskPolicy& policy, std::string_view sample,
                               const RenderedChat& rendered) {
  if (!chat_template.marks_generation())
    return SpanFinder(tokenizer, chat_template, input, policy, sample, rendered.text).run();
  std::vector<ByteSpan> spans = rendered.generation;
  if (policy.last_turn_only && spans.size() > 1) spans = {spans.back()};
  for (ByteSpan& span : spans)
    while (policy.trailing_newline && span.end < static_cast<int64_t>(rendered.text.size()) &&
           kWhite.find(rendered.text[static_cast<size_t>(span.end)]) != std::string_view::npos)
      ++span.end;
  return spans;
}

RenderedChat render_sample(const ChatTemplate& chat_template, const ChatInput& input,
                           std::string_view sample) {
  try {
    return chat_template.render(input);
  } catch (const BadData& error) {
    throw BadData("{}: {}", sample, error.what());
  }
}

// `spans` are ascending and apart.
MaskedTokens masked(Encoding encoding, const std::vector<ByteSpan>& spans) {
  MaskedTokens out;
  out.loss_mask.assign(encoding.ids.size(), 0);
  size_t span = 0;
  for (size_t i = 0; i < encoding.ids.size(); ++i) {
    const ByteSpan& token = encoding.spans[i];
    while (span < spans.size() && spans[span].end <= token.begin) ++span;
    if (span == spans.size()) break;
    out.loss_mask[i] =
        token.begin < token.end && token.begin >= spans[span].begin && token.end <= spans[span].end;
  }
  out.ids = std::move(encoding.ids);
  out.dropped_bytes = encoding.dropped_bytes;
  return out;
}

// With BOS by the tokenizer's rule, but once: the text may begin with it.
Encoding encode_document(const Tokenizer& tokenizer, std::string_view text) {
  Encoding encoding = tokenizer.encode(text, /*add_special_tokens=*/true);
  const auto bos = tokenizer.special().bos;
  if (bos && encoding.ids.size() > 1 && encoding.ids[0] == *bos && encoding.ids[1] == *bos &&
      encoding.spans[0].begin == encoding.spans[0].end) {
    encoding.ids.erase(encoding.ids.begin());
    encoding.spans.erase(encoding.spans.begin());
    encoding.spans[0].end = encoding.spans[0].begin;  // it is the one that the rule wants: not learned
  }
  return encoding;
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
  return spans_of(tokenizer, chat_template, input, policy, sample,
                  render_sample(chat_template, input, sample));
}

MaskedTokens tokenize_chat(const Tokenizer& tokenizer, const ChatTemplate& chat_template,
                           const ChatInput& input, const ChatMaskPolicy& policy, std::string_view sample) {
  const RenderedChat rendered = render_sample(chat_template, input, sample);
  const std::vector<ByteSpan> spans = spans_of(tokenizer, chat_template, input, policy, sample, rendered);
  return masked(tokenizer.encode(rendered.text), spans);
}

MaskedTokens tokenize_text(const Tokenizer& tokenizer, std::string_view text, const TextPolicy& policy) {
  MaskedTokens out = masked(encode_document(tokenizer, text), {{0, static_cast<int64_t>(text.size())}});
  append_eos(tokenizer, policy, out);
  return out;
}

MaskedTokens tokenize_prompt_response(const Tokenizer& tokenizer, std::string_view prompt,
                                      std::string_view response, const TextPolicy& policy) {
  const std::string whole = std::string(prompt) + std::string(response);
  MaskedTokens out = masked(encode_document(tokenizer, whole),
                            {{static_cast<int64_t>(prompt.size()), static_cast<int64_t>(whole.size())}});
  append_eos(tokenizer, policy, out);
  return out;
}

}  // namespace titanium
