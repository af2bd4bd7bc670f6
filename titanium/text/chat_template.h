// The subset of Jinja that chat templates use, rendered as transformers does (trim_blocks, lstrip_blocks,
// tojson without HTML escapes, raise_exception, strftime_now, {% generation %}).
#pragma once
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/text/tokenizer.h"

namespace titanium {

using ChatJson = nlohmann::ordered_json;  // keeps the order of keys, which tojson shows

struct ChatInput {
  ChatJson messages = ChatJson::array();  // [{"role": ..., "content": ..., ...}]
  bool add_generation_prompt = false;
  std::string bos_token, eos_token;  // as text
  ChatJson tools;                    // null or an array of JSON schemas
  ChatJson variables =
      ChatJson::object();      // further variables of the template: enable_thinking, documents, ...
  std::optional<int64_t> now;  // seconds since 1970 for strftime_now (local time); empty is the clock
};

struct RenderedChat {
  std::string text;
  std::vector<ByteSpan> generation;  // bytes of each {% generation %} block, in order
};

class ChatTemplate {
 public:
  // BadConfig names the construct that is not supported, and its line.  `name` is what messages call the
  // source.
  static ChatTemplate compile(std::string_view source, const std::string& name = "chat_template");

  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;
  ~ChatTemplate();

  // As in transformers 5, a message's keys whose value is null are left out, and reasoning_content and
  // thinking are filled from one another or from reasoning.  BadData for raise_exception and for operations
  // that do not fit the messages (with the line); BadConfig for a filter, test, method or function that does
  // not exist, and past the limits (output 64 MiB, 512 MiB of values, 10 million steps, nesting 200).
  RenderedChat render(const ChatInput& input) const;

  bool marks_generation() const;  // has {% generation %} blocks
  const std::string& name() const;

 private:
  struct Impl;
  explicit ChatTemplate(std::shared_ptr<const Impl> impl);
  std::shared_ptr<const Impl> impl_;
};

}  // namespace titanium
