#include "titanium/config/toml_guard.h"

#include <algorithm>

#include "titanium/base/error.h"

namespace titanium {
namespace {

class Guard {
 public:
  Guard(std::string_view text, const std::string& source) : text_(text), source_(source) {}

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
      } else if (outside_ascii(at_)) {
        throw BadConfig("{}:{}: a character outside ASCII stands outside strings and comments", source_,
                        line_);
      }
      ++at_;
    }
  }

 private:
  static constexpr int kMostDots = 64, kMostBraces = 64;

  bool outside_ascii(size_t i) const {
    return i < text_.size() && static_cast<unsigned char>(text_[i]) >= 0x80;
  }

  // From the opening quote to behind the closing one.  False where the text cannot be TOML: the parser stops
  // here too.
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
      if (quote == '"' && text_[at_] == '\\') {
        ++at_;
        if (multiline) check_line_end();
        // The escaped character, so that \" does not end the string; a line break is counted above.
        if (at_ < text_.size() && text_[at_] != '\n') ++at_;
      } else {
        ++at_;
      }
    }
    return false;
  }

  // After a backslash: white space up to the next character is dropped by the parser, which looks at that
  // character.
  void check_line_end() const {
    size_t i = at_;
    int line = line_;
    for (; i < text_.size() && (text_[i] == ' ' || text_[i] == '\t' || text_[i] == '\r' || text_[i] == '\n');
         ++i) {
      line += text_[i] == '\n' ? 1 : 0;
    }
    if (outside_ascii(i)) {
      throw BadConfig("{}:{}: a character outside ASCII follows a backslash that ends a line", source_, line);
    }
  }

  std::string_view text_;
  const std::string& source_;
  size_t at_ = 0;
  int line_ = 1, dots_ = 0, braces_ = 0;
};

}  // namespace

void guard_toml(std::string_view text, const std::string& source) {
  Guard(text, source).run();
}

}  // namespace titanium
