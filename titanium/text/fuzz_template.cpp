// Input: a chat template, a zero byte, messages as JSON (a few of ours where there are none).
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/text/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t cut = std::min(bytes.find('\0'), bytes.size());
  titanium::ChatInput input;
  input.messages = titanium::ChatJson::parse(
      R"([{"role": "system", "content": " s "}, {"role": "user", "content": "é <|im_end|>"},
          {"role": "assistant", "content": "a", "thinking": "t",
           "tool_calls": [{"id": "abcdefghi", "function": {"name": "f", "arguments": {"x": [1, 2.5, null]}}}]},
          {"role": "tool", "content": "r"}])");
  input.bos_token = "<s>";
  input.now = 0;
  input.add_generation_prompt = size % 2 == 0;
  if (cut < bytes.size()) {
    titanium::ChatJson given = titanium::ChatJson::parse(bytes.substr(cut + 1), nullptr, false);
    if (!given.is_discarded()) input.messages = given;
  }
  input.tools = input.messages;
  try {
    const auto chat = titanium::ChatTemplate::compile(bytes.substr(0, cut));
    const titanium::RenderedChat out = chat.render(input);
    for (const titanium::ByteSpan& span : out.generation)
      if (span.begin > span.end || span.end > static_cast<int64_t>(out.text.size())) std::abort();
  } catch (const titanium::BadConfig&) {
  } catch (const titanium::BadData&) {
  }
  return 0;
}
