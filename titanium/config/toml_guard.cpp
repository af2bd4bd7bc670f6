#include "titanium/config/toml_guard.h"

#include <algorithm>
#include <cstdint>

#include "titanium/base/error.h"
#include "titanium/config/utf8.h"

namespace titanium {
namespace {

bool is_ascii(char c) {
  return static_cast<unsigned char>(c) < 0x80;
}

void check_utf8(std::string_view text, const std::string& source) {
  int line = 1;
  for (size_t begin = 0; begin < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    if (!is_utf8(text.substr(begin, end - begin))) throw BadConfig("{}:{}: not UTF-8", source, line);
    begin = end + 1;
  }
}

// Counts dots and braces outside strings and comments.  Where a quote stands in no place for a string, and
// where a string does not end, the parser stops as well, so what follows does not matter.
class DepthCheck {
 public:
  DepthCheck(std::string_view text, const std::string& source) : text_(text), source_(source) {}

  void run() {
    while (at_ < text_.size()) {
      const char c = text_[at_];
      if (c == '"' || c == '\'') {
        if (!skip_string(c)) return;
        continue;
      }
      if (c == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
        continue;
      }
      if (c == '\n') {
        ++line_;
        dots_ = 0;
      } else if (c == '.' && ++dots_ > kMostDots) {
        throw BadConfig("{}:{}: more than {} dots outside strings", source_, line_, kMostDots);
      } else if (c == '{' && ++braces_ > kMostBraces) {
        throw BadConfig("{}:{}: more than {} inline tables", source_, line_, kMostBraces);
      }
      ++at_;
    }
  }

 private:
  static constexpr int kMostDots = 64, kMostBraces = 64;

  // From the opening quote to behind the closing one; false where there is none.
  bool skip_string(char quote) {
    const std::string triple(3, quote);
    const bool multiline = text_.substr(at_).starts_with(triple);
    at_ += multiline ? 3 : 1;
    while (at_ < text_.size()) {
      if (multiline ? text_.substr(at_).starts_with(triple) : text_[at_] == quote) {
        at_ += multiline ? 3 : 1;
        // A string of several lines may end in one or two quotes of its own.
        for (int extra = 0; multiline && extra < 2 && at_ < text_.size() && text_[at_] == quote; ++extra)
          ++at_;
        return true;
      }
      if (text_[at_] == '\n') {
        if (!multiline) return false;
        ++line_;
      }
      const bool escape = quote == '"' && text_[at_] == '\\';
      ++at_;
      if (escape && at_ < text_.size() && text_[at_] != '\n') ++at_;  // \" does not end the string
    }
    return false;
  }

  std::string_view text_;
  const std::string& source_;
  size_t at_ = 0;
  int line_ = 1, dots_ = 0, braces_ = 0;
};

// "~0:", "~1:", ...: starts with a character that it does not hold again, so it cannot arise where two pieces
// meet.
std::string unused_mark(std::string_view text) {
  for (int n = 0;; ++n) {
    std::string mark = fmt::format("~{}:", n);
    if (text.find(mark) == std::string_view::npos) return mark;
  }
}

// \u007E is a ~ too.
bool has_escaped_tilde(std::string_view text) {
  for (const char* escape : {"\\u007e", "\\u007E", "\\U0000007e", "\\U0000007E"}) {
    if (text.find(escape) != std::string_view::npos) return true;
  }
  return false;
}

int digit_value(char c) {
  return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

}  // namespace

GuardedToml::GuardedToml(std::string_view text, const std::string& source) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  check_utf8(text, source);
  DepthCheck(text, source).run();
  if (std::all_of(text.begin(), text.end(), is_ascii)) {
    text_ = text;
    return;
  }
  if (has_escaped_tilde(text)) {
    throw BadConfig("{}: write ~ itself in place of its escape, in a file with characters outside ASCII",
                    source);
  }
  mark_ = unused_mark(text);
  for (const char c : text) {
    if (is_ascii(c)) {
      text_ += c;
    } else {
      text_ += fmt::format("{}{:02x}", mark_, static_cast<unsigned char>(c));
    }
  }
}

std::string GuardedToml::restore(std::string_view parsed) const {
  std::string out;
  while (!mark_.empty()) {
    const size_t at = parsed.find(mark_);
    const size_t digits = at + mark_.size();
    if (at == std::string_view::npos || parsed.size() < digits + 2) break;
    const int high = digit_value(parsed[digits]), low = digit_value(parsed[digits + 1]);
    if (high < 0 || low < 0) break;
    out += parsed.substr(0, at);
    out += static_cast<char>(high * 16 + low);
    parsed.remove_prefix(digits + 2);
  }
  out += parsed;
  return out;
}

}  // namespace titanium
