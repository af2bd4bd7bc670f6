// Unicode normalization form C, with the way back to the original bytes.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "titanium/text/tokenizer.h"
#include "titanium/text/unicode.h"

namespace titanium {

// `spans` stays empty if the text is its own NFC (then `text` is empty too); else for each byte of `text` the
// bytes of the original that it came from.  A stretch that NFC rewrites maps to the whole of the stretch it
// replaces.
struct Normalized {
  bool changed = false;
  std::string text;
  std::vector<ByteSpan> spans;
};

// `input` must be UTF-8.
Normalized nfc(std::string_view input, const unicode::Properties& properties);

}  // namespace titanium
