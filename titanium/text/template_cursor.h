// The tokens of a template, read from the front: what the parsers of expressions and of statements share.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/text/template_lexer.h"

namespace titanium::jinja {

class TokenCursor {
 protected:
  // BadConfig, as everything below, for a template that is too large or no template.
  TokenCursor(std::string_view source, std::string name) : name_(std::move(name)) {
    if (source.size() > kMaxSource)
      throw BadConfig("{}: a template of {} bytes; at most {}", name_, source.size(), kMaxSource);
    tokens_ = lex(source, name_);
  }

  using Kind = Token::Kind;

  // Counts the nesting of the functions that call one another.
  struct Nested {
    explicit Nested(TokenCursor& cursor) : cursor_(cursor) {
      if (++cursor.nesting_ > kMaxNesting) cursor.fail("nested deeper than {}", kMaxNesting);
    }
    ~Nested() { --cursor_.nesting_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    TokenCursor& cursor_;
  };

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw BadConfig("{}:{}: {}", name_, now().line, fmt::format(format, std::forward<Args>(args)...));
  }

  const Token& now() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  void next() { at_ += at_ + 1 < tokens_.size(); }
  bool is(Kind kind) const { return now().kind == kind; }
  bool is_op(std::string_view op) const { return is(Kind::kOperator) && now().text == op; }
  bool is_name(std::string_view word) const { return is(Kind::kName) && now().text == word; }
  bool take_op(std::string_view op) { return is_op(op) && (next(), true); }
  bool take_name(std::string_view word) { return is_name(word) && (next(), true); }
  std::string shown() const {
    switch (now().kind) {
      case Kind::kText:
        return "text";
      case Kind::kBlockBegin:
        return "{%";
      case Kind::kBlockEnd:
        return "%}";
      case Kind::kPrintBegin:
        return "{{";
      case Kind::kPrintEnd:
        return "}}";
      case Kind::kString:
        return "a text";
      case Kind::kEnd:
        return "the end of the template";
      default:
        return "'" + now().text + "'";
    }
  }
  void expect_op(std::string_view op) {
    if (!take_op(op)) fail("'{}' is expected, not {}", op, shown());
  }
  void expect_name(std::string_view word) {
    if (!take_name(word)) fail("'{}' is expected, not {}", word, shown());
  }
  std::string name() {
    if (!is(Kind::kName)) fail("a name is expected, not {}", shown());
    std::string text = now().text;
    next();
    return text;
  }
  void block_end() {
    if (!is(Kind::kBlockEnd)) fail("the end of the block is expected, not {}", shown());
    next();
  }

 private:
  static constexpr int kMaxNesting = 200;  // of blocks and brackets
  static constexpr size_t kMaxSource = 1 << 20;

  std::string name_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
};

}  // namespace titanium::jinja
