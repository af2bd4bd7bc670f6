// Input: a tokenizer.json, a zero byte, a text to encode.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "titanium/base/error.h"
#include "titanium/text/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const size_t cut = std::min(bytes.find('\0'), bytes.size());
  const std::string_view text = bytes.substr(std::min(cut + 1, bytes.size()));
  try {
    const titanium::Tokenizer tokenizer = titanium::Tokenizer::from_json(bytes.substr(0, cut));
    for (const bool special : {false, true}) {
      const titanium::Encoding encoding = tokenizer.encode(text, special);
      if (encoding.ids.size() != encoding.spans.size()) std::abort();
      int64_t begin = 0, end = 0;
      for (const titanium::ByteSpan& span : encoding.spans) {
        if (span.begin < begin || span.end < end || span.end < span.begin ||
            span.end > static_cast<int64_t>(text.size()))
          std::abort();
        begin = span.begin;
        end = span.end;
      }
      titanium::StreamDecoder stream(tokenizer, special);
      std::string decoded;
      for (const int64_t id : encoding.ids) decoded += stream.push(id);
      if (decoded + stream.finish() != tokenizer.decode(encoding.ids, special)) std::abort();
    }
  } catch (const titanium::BadConfig&) {
  } catch (const titanium::BadData&) {
  }
  return 0;
}
