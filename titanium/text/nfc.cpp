#include "titanium/text/nfc.h"

#include <utf8proc.h>

#include <cstdlib>
#include <memory>

#include "titanium/base/error.h"

namespace titanium {
namespace {

std::string compose(std::string_view piece) {
  utf8proc_uint8_t* result = nullptr;
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(piece.data()),
                                 static_cast<utf8proc_ssize_t>(piece.size()), &result,
                                 static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(result, &std::free);
  if (size < 0) throw BadData("NFC of {} bytes failed: {}", piece.size(), utf8proc_errmsg(size));
  return {reinterpret_cast<const char*>(result), static_cast<size_t>(size)};
}

}  // namespace

Normalized nfc(std::string_view input, const unicode::Properties& properties) {
  Normalized out;
  size_t copied = 0;  // input[0, copied) is in `out`, if anything changed
  auto copy_to = [&](size_t end) {
    for (size_t i = copied; i < end; ++i)
      out.spans.push_back({static_cast<int64_t>(i), static_cast<int64_t>(i + 1)});
    out.text.append(input.substr(copied, end - copied));
    copied = end;
  };
  // A stretch begins at a character that never joins the one before it.  A stretch of one character that does
  // not rewrite alone is its own NFC.
  size_t begin = 0;
  while (begin < input.size()) {
    const auto [code, size] = unicode::at(input, begin);
    size_t end = begin + size;
    bool plain = code < 0x300 || !(properties.of(code) & (unicode::kNfcRewrites | unicode::kNfcJoins));
    while (end < input.size() &&
           static_cast<uint8_t>(input[end]) >= 0xcc) {  // U+0300 is the first that joins
      const auto next = unicode::at(input, end);
      if (!(properties.of(next.code) & unicode::kNfcJoins)) break;
      plain = false;
      end += next.size;
    }
    if (!plain) {
      const std::string_view piece = input.substr(begin, end - begin);
      const std::string composed = compose(piece);
      if (composed != piece) {
        copy_to(begin);
        out.changed = true;
        out.text += composed;
        out.spans.insert(out.spans.end(), composed.size(),
                         {static_cast<int64_t>(begin), static_cast<int64_t>(end)});
        copied = end;
      }
    }
    begin = end;
  }
  if (out.changed) copy_to(input.size());
  return out;
}

}  // namespace titanium
