// Cuts a template into text and tokens, with Jinja's rules for whitespace under trim_blocks and
// lstrip_blocks.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace titanium::jinja {

struct Token {
  enum class Kind {
    kText,
    kBlockBegin,  // {%
    kBlockEnd,
    kPrintBegin,  // {{
    kPrintEnd,
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd,
  };
  Kind kind;
  std::string text;  // of kText and kString the final one, else as written
  int line;
};

// BadConfig with name and line.
std::vector<Token> lex(std::string_view source, const std::string& name);

}  // namespace titanium::jinja
