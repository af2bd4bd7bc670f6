// UTF-8 and the few properties of characters that tokenizers ask for.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace titanium::unicode {

// Properties, Unicode 16.0 (see make_unicode_table.py).
enum Property : uint8_t {
  kLetter = 1,        // \p{L}
  kNumber = 2,        // \p{N}
  kSpace = 4,         // \s
  kWord = 8,          // \w, as Rust's regex has it
  kDigits = 16,       // what the pre-tokenizer Digits splits at (Rust's char::is_numeric)
  kNfcJoins = 32,     // may combine with the character before it under NFC
  kNfcRewrites = 64,  // changes under NFC even when alone
  kUnprintable = 128  // not str.isprintable() in Python
};

// By bisection; for a table that is faster see Properties.
uint8_t properties_of(uint32_t code);

// A two-level table, 80 KB.  Built once per tokenizer, then shared.
class Properties {
 public:
  Properties();
  uint8_t of(uint32_t c) const { return pages_[static_cast<size_t>(index_[c >> 8]) << 8 | (c & 255)]; }
  uint8_t of_ascii(uint8_t c) const { return pages_[c]; }  // c < 128; page 0 is the first

 private:
  std::vector<uint16_t> index_;  // [0x1100]
  std::vector<uint8_t> pages_;
};

// Position of the first byte that is not UTF-8, or npos.
size_t find_bad_utf8(std::string_view text);

struct Char {
  uint32_t code;
  uint32_t size;  // bytes
};
// The character at `i`; text must be valid UTF-8 and i the start of a character.
inline Char at(std::string_view text, size_t i) {
  const auto* p = reinterpret_cast<const uint8_t*>(text.data()) + i;
  if (p[0] < 0x80) return {p[0], 1};
  if (p[0] < 0xe0) return {(p[0] & 0x1fu) << 6 | (p[1] & 0x3fu), 2};
  if (p[0] < 0xf0) return {(p[0] & 0xfu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu), 3};
  return {(p[0] & 7u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu), 4};
}
inline bool starts_char(char byte) {
  return (static_cast<uint8_t>(byte) & 0xc0) != 0x80;
}

// The start of the character that ends at `i` > 0.
inline size_t before(std::string_view text, size_t i) {
  do --i;
  while (i > 0 && !starts_char(text[i]));
  return i;
}

void append(std::string& out, uint32_t code);

// Appends `bytes` with each maximal bad piece replaced by U+FFFD, as Rust's from_utf8_lossy and Unicode's
// recommended practice do (The Unicode Standard 16, section 3.9).  With `tail`, a piece at the end that more
// bytes could complete goes there instead.
void append_repaired(std::string& out, std::string_view bytes, std::string* tail = nullptr);

}  // namespace titanium::unicode
