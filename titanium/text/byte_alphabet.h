// The printable characters that stand for bytes in a byte-level vocabulary (GPT-2's bytes_to_unicode).
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "titanium/text/unicode.h"

namespace titanium {

class ByteAlphabet {
 public:
  ByteAlphabet() {
    uint32_t next = 256;
    bytes_.fill(-1);
    for (uint32_t b = 0; b < 256; ++b) {
      const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
      chars_[b] = printable ? b : next++;
      bytes_[chars_[b]] = static_cast<int>(b);
    }
  }
  std::string character(uint8_t byte) const {
    std::string out;
    unicode::append(out, chars_[byte]);
    return out;
  }
  // The bytes that `token` (UTF-8) stands for; false if one of its characters stands for none.
  bool to_bytes(std::string_view token, std::string* bytes) const {
    bytes->clear();
    for (size_t i = 0; i < token.size();) {
      const auto [code, size] = unicode::at(token, i);
      if (code >= bytes_.size() || bytes_[code] < 0) return false;
      *bytes += static_cast<char>(bytes_[code]);
      i += size;
    }
    return true;
  }

 private:
  std::array<uint32_t, 256> chars_;
  std::array<int, 324> bytes_;  // the alphabet ends at U+0143
};

}  // namespace titanium
