#include "titanium/text/template_lexer.h"

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/text/template_value.h"
#include "titanium/text/unicode.h"

namespace titanium::jinja {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
bool starts_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& name) : name_(name) {
    // Jinja reads \r\n and \r as \n, and drops one newline at the end.
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] == '\r') {
        source_ += '\n';
        if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
      } else {
        source_ += source[i];
      }
    }
    if (source_.ends_with('\n')) source_.pop_back();
    if (unicode::find_bad_utf8(source_) != std::string::npos) fail("the template is not UTF-8");
  }

  std::vector<Token> run() {
    while (at_ < source_.size()) {
      const size_t open = next_tag();
      if (open == std::string::npos) {
        add_text(source_.substr(at_));
        break;
      }
      const char kind = source_[open + 1];
      std::string text = source_.substr(at_, open - at_);
      size_t inside = open + 2;
      const char sign = inside < source_.size() ? source_[inside] : '\0';
      if (sign == '-' || sign == '+') ++inside;
      const int line_of_text = line_;
      const int newlines = static_cast<int>(std::count(text.begin(), text.end(), '\n'));
      if (sign == '-')
        strip_end(text);
      else if (sign != '+' && kind != '{')
        strip_line_start(text);
      add_text(std::move(text));
      line_ = line_of_text + newlines;
      at_ = inside;
      if (kind == '#')
        comment();
      else if (kind == '%' && raw())
        continue;
      else
        tag(kind == '%');
    }
    tokens_.push_back({Token::Kind::kEnd, "", line_});
    return std::move(tokens_);
  }

 private:
  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw BadConfig("{}:{}: {}", name_, line_, fmt::format(format, std::forward<Args>(args)...));
  }

  bool looking_at(std::string_view text) const {
    return std::string_view(source_).substr(at_).starts_with(text);
  }

  size_t next_tag() const {
    for (size_t i = source_.find('{', at_); i != std::string::npos && i + 1 < source_.size();
         i = source_.find('{', i + 1))
      if (source_[i + 1] == '{' || source_[i + 1] == '%' || source_[i + 1] == '#') return i;
    return std::string::npos;
  }

  void add_text(std::string text) {
    const int newlines = static_cast<int>(std::count(text.begin(), text.end(), '\n'));
    if (!text.empty()) tokens_.push_back({Token::Kind::kText, std::move(text), line_});
    line_ += newlines;
  }

  static void strip_end(std::string& text) {
    while (!text.empty()) {
      const size_t last = unicode::before(text, text.size());
      if (!is_python_space(unicode::at(text, last).code)) break;
      text.resize(last);
    }
  }

  // lstrip_blocks: blanks between the start of a line and the tag go.
  void strip_line_start(std::string& text) const {
    const size_t line = text.rfind('\n') + 1;  // 0 if there is none
    if ((line == 0 && !line_starting_) || line == text.size()) return;
    std::string blanks = text.substr(line);
    strip_end(blanks);
    if (blanks.empty()) text.resize(line);
  }

  void skip_space() {
    while (at_ < source_.size()) {
      const auto [code, size] = unicode::at(source_, at_);
      if (!is_python_space(code)) break;
      line_ += code == '\n';
      at_ += size;
    }
  }

  // After the end of a tag: `-` drops all space, and trim_blocks one newline.
  void end_tag(size_t size, bool trims_newline) {
    const char sign = source_[at_];
    at_ += size;
    line_starting_ = false;
    const size_t before = at_;
    if (sign == '-') {
      skip_space();
    } else if (trims_newline && sign != '+' && at_ < source_.size() && source_[at_] == '\n') {
      ++at_;
      ++line_;
    }
    line_starting_ = at_ > before && source_[at_ - 1] == '\n';
  }

  void comment() {
    const size_t close = source_.find("#}", at_);
    if (close == std::string::npos) fail("the comment is not closed");
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(close), '\n'));
    const bool sign = close > at_ && (source_[close - 1] == '-' || source_[close - 1] == '+');
    at_ = sign ? close - 1 : close;
    end_tag(sign ? 3 : 2, true);
  }

  // {% raw %}...{% endraw %}; false if this is another block.
  bool raw() {
    const size_t start = at_;
    const int line = line_;
    skip_space();
    if (!looking_at("raw")) return at_ = start, line_ = line, false;
    at_ += 3;
    skip_space();
    if (looking_at("%}"))
      end_tag(2, false);
    else if (looking_at("-%}"))
      end_tag(3, false);
    else
      return at_ = start, line_ = line, false;
    const size_t begin = at_;
    auto skip_blanks = [&](size_t i) {
      while (i < source_.size() && (source_[i] == ' ' || source_[i] == '\t' || source_[i] == '\n')) ++i;
      return i;
    };
    for (size_t open = source_.find("{%", at_); open != std::string::npos;
         open = source_.find("{%", open + 2)) {
      const char sign = open + 2 < source_.size() ? source_[open + 2] : '\0';
      const size_t word = skip_blanks(open + (sign == '-' || sign == '+' ? 3 : 2));
      if (word >= source_.size() || source_.compare(word, 6, "endraw") != 0) continue;
      at_ = skip_blanks(word + 6);
      const size_t size = looking_at("%}") ? 2 : looking_at("-%}") || looking_at("+%}") ? 3 : 0;
      if (size == 0) continue;
      std::string text = source_.substr(begin, open - begin);
      const std::string_view passed = std::string_view(source_).substr(begin, at_ - begin);
      const int line_of_tag = line_ + static_cast<int>(std::count(passed.begin(), passed.end(), '\n'));
      if (sign == '-')
        strip_end(text);
      else if (sign != '+')
        strip_line_start(text);
      add_text(std::move(text));
      line_ = line_of_tag;
      end_tag(size, true);
      return true;
    }
    fail("{{% raw %}} is not closed");
  }

  void tag(bool block) {
    tokens_.push_back({block ? Token::Kind::kBlockBegin : Token::Kind::kPrintBegin, "", line_});
    std::string open;  // brackets
    for (;;) {
      skip_space();
      if (at_ >= source_.size()) fail("a tag is not closed");
      const std::string_view close = block ? "%}" : "}}";
      if (open.empty()) {
        const bool sign = source_[at_] == '-' || (block && source_[at_] == '+');
        if (std::string_view(source_).substr(at_ + sign).starts_with(close)) {
          tokens_.push_back({block ? Token::Kind::kBlockEnd : Token::Kind::kPrintEnd, "", line_});
          end_tag(close.size() + sign, block);
          return;
        }
      }
      token(open);
    }
  }

  void token(std::string& open) {
    const char c = source_[at_];
    const size_t begin = at_;
    if (starts_name(c)) {
      while (at_ < source_.size() && (starts_name(source_[at_]) || is_digit(source_[at_]))) ++at_;
      add(Token::Kind::kName, begin);
    } else if (is_digit(c)) {
      number();
    } else if (c == '\'' || c == '"') {
      string(c);
    } else {
      for (const std::string_view op : {"//", "**", "==", "!=", ">=", "<="}) {
        if (!looking_at(op)) continue;
        at_ += 2;
        add(Token::Kind::kOperator, begin);
        return;
      }
      if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos)
        fail("unexpected '{}'", source_.substr(at_, unicode::at(source_, at_).size));
      if (c == '(' || c == '[' || c == '{') open += c;
      if (c == ')' || c == ']' || c == '}') {
        const char expected = c == ')' ? '(' : c == ']' ? '[' : '{';
        if (open.empty() || open.back() != expected) fail("unexpected '{}'", c);
        open.pop_back();
      }
      ++at_;
      add(Token::Kind::kOperator, begin);
    }
  }

  void add(Token::Kind kind, size_t begin) {
    tokens_.push_back({kind, source_.substr(begin, at_ - begin), line_});
  }

  void digits() {
    while (at_ < source_.size() &&
           (is_digit(source_[at_]) ||
            (source_[at_] == '_' && at_ + 1 < source_.size() && is_digit(source_[at_ + 1]))))
      ++at_;
  }

  void number() {
    const size_t begin = at_;
    digits();
    bool real = false;
    if (at_ + 1 < source_.size() && source_[at_] == '.' && is_digit(source_[at_ + 1])) {
      real = true;
      ++at_;
      digits();
    }
    if (at_ < source_.size() && (source_[at_] == 'e' || source_[at_] == 'E')) {
      size_t power = at_ + 1;
      if (power < source_.size() && (source_[power] == '+' || source_[power] == '-')) ++power;
      if (power < source_.size() && is_digit(source_[power])) {
        real = true;
        at_ = power;
        digits();
      }
    }
    if (at_ < source_.size() && starts_name(source_[at_])) fail("a number is followed by '{}'", source_[at_]);
    add(real ? Token::Kind::kFloat : Token::Kind::kInteger, begin);
    std::erase(tokens_.back().text, '_');
  }

  void string(char quote) {
    const int line = line_;
    std::string out;
    for (++at_;; ++at_) {
      if (at_ >= source_.size()) fail("a text is not closed");
      const char c = source_[at_];
      if (c == quote) break;
      line_ += c == '\n';
      if (c == '\\')
        escape(out);
      else
        out += c;
    }
    ++at_;
    tokens_.push_back({Token::Kind::kString, std::move(out), line});
  }

  // Python's escapes, with at_ on the backslash; leaves it on the last character.
  void escape(std::string& out) {
    if (++at_ >= source_.size()) fail("a text is not closed");
    const char c = source_[at_];
    switch (c) {
      case '\n':
        line_ += 1;
        return;
      case 'n':
        out += '\n';
        return;
      case 't':
        out += '\t';
        return;
      case 'r':
        out += '\r';
        return;
      case 'a':
        out += '\a';
        return;
      case 'b':
        out += '\b';
        return;
      case 'f':
        out += '\f';
        return;
      case 'v':
        out += '\v';
        return;
      case '\\':
      case '\'':
      case '"':
        out += c;
        return;
      case 'x':
      case 'u':
      case 'U': {
        const size_t count = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        uint32_t code = 0;
        for (size_t i = 1; i <= count; ++i) {
          const char h = at_ + i < source_.size() ? source_[at_ + i] : '\0';
          const int digit = is_digit(h)            ? h - '0'
                            : h >= 'a' && h <= 'f' ? h - 'a' + 10
                            : h >= 'A' && h <= 'F' ? h - 'A' + 10
                                                   : -1;
          if (digit < 0) fail("the escape \\{} wants {} hexadecimal digits", c, count);
          code = code << 4 | static_cast<uint32_t>(digit);
        }
        at_ += count;
        if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
          fail("the escape \\{} names no character", c);
        unicode::append(out, code);
        return;
      }
      default:
        if (c >= '0' && c <= '7') {
          uint32_t code = 0;
          size_t count = 0;
          for (; count < 3 && at_ < source_.size() && source_[at_] >= '0' && source_[at_] <= '7';
               ++count, ++at_)
            code = code << 3 | static_cast<uint32_t>(source_[at_] - '0');
          --at_;
          unicode::append(out, code);
          return;
        }
        if (c == 'N') fail("the escape \\N is not supported");
        out += '\\';
        out += c;
    }
  }

  std::string name_;
  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> lex(std::string_view source, const std::string& name) {
  return Lexer(source, name).run();
}

}  // namespace titanium::jinja
