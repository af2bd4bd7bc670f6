// Jinja's grammar, as far as chat templates use it: the statements.
#include <algorithm>
#include <initializer_list>

#include "titanium/base/error.h"
#include "titanium/text/template_ast.h"
#include "titanium/text/template_expressions.h"

namespace titanium::jinja {
namespace {

class Parser : private ExpressionParser {
 public:
  Parser(std::string_view source, const std::string& name) : ExpressionParser(source, name) {}

  Tree run() {
    Tree tree;
    tree.body = body({});
    tree.generation = generation_;
    return tree;
  }

 private:
  // Up to a block whose name is one of `ends`; leaves the parser on that name.  Without ends, up to the end.
  Body body(std::initializer_list<std::string_view> ends) {
    const Nested nested(*this);
    Body out;
    for (;;) {
      auto statement = std::make_unique<Statement>();
      statement->line = now().line;
      if (is(Kind::kEnd)) {
        if (ends.size() > 0) fail("{{% {} %}} is expected before the end of the template", *(ends.end() - 1));
        return out;
      }
      if (is(Kind::kText)) {
        statement->kind = Statement::Kind::kText;
        statement->text = now().text;
        next();
      } else if (is(Kind::kPrintBegin)) {
        next();
        statement->kind = Statement::Kind::kPrint;
        statement->expr = expression_list();
        if (!is(Kind::kPrintEnd)) fail("'}}}}' is expected, not {}", shown());
        next();
      } else {
        next();  // {%
        if (is(Kind::kName) && std::find(ends.begin(), ends.end(), now().text) != ends.end()) return out;
        block(*statement);
      }
      out.push_back(std::move(statement));
    }
  }

  void block(Statement& out) {
    const std::string word = name();
    if (word == "if") {
      if_block(out);
    } else if (word == "for") {
      for_block(out);
    } else if (word == "set") {
      set_block(out);
    } else if (word == "macro") {
      macro_block(out);
    } else if (word == "filter") {
      out.kind = Statement::Kind::kFilter;
      if (!is(Kind::kName)) fail("the name of a filter is expected, not {}", shown());
      out.expr = filters(nullptr, true);
      block_end();
      out.body = closed_body("endfilter");
    } else if (word == "generation") {
      if (inside_capture_ > 0)
        fail("{{% generation %}} inside a macro, {{% filter %}} or {{% set %}} block is not supported");
      out.kind = Statement::Kind::kGeneration;
      generation_ = true;
      block_end();
      const int loops = std::exchange(loops_, 0);
      out.body = closed_body("endgeneration");
      loops_ = loops;
    } else if (word == "break" || word == "continue") {
      if (loops_ == 0) fail("{{% {} %}} outside of a loop", word);
      out.kind = word == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue;
      block_end();
    } else {
      fail(
          "the block '{}' is not supported; supported are if, for, set, macro, filter, generation, break, "
          "continue "
          "and raw",
          word);
    }
  }

  Body closed_body(std::string_view end) {
    Body out = body({end});
    next();
    block_end();
    return out;
  }

  void if_block(Statement& out) {
    out.kind = Statement::Kind::kIf;
    for (;;) {
      ExprPtr condition = expression_list();
      block_end();
      out.branches.emplace_back(std::move(condition), body({"elif", "else", "endif"}));
      if (take_name("elif")) continue;
      if (take_name("else")) {
        block_end();
        out.otherwise = closed_body("endif");
        return;
      }
      expect_name("endif");
      block_end();
      return;
    }
  }

  void for_block(Statement& out) {
    out.kind = Statement::Kind::kFor;
    out.target = target(false);
    expect_name("in");
    out.expr = expression_list(false);
    if (take_name("if")) out.condition = expression();
    if (is_name("recursive")) fail("a recursive loop is not supported");
    block_end();
    ++loops_;
    ++inside_loop_;
    out.body = body({"else", "endfor"});
    --loops_;
    --inside_loop_;
    if (take_name("else")) {
      block_end();
      out.otherwise = closed_body("endfor");
      return;
    }
    expect_name("endfor");
    block_end();
  }

  void set_block(Statement& out) {
    out.target = target(true);
    if (take_op("=")) {
      out.kind = Statement::Kind::kSet;
      out.expr = expression_list();
      block_end();
      return;
    }
    out.kind = Statement::Kind::kSetBlock;
    if (is_op("|")) out.expr = filters(nullptr, false);
    block_end();
    capture([&] { out.body = closed_body("endset"); });
  }

  void macro_block(Statement& out) {
    if (inside_loop_ > 0 || inside_capture_ > 0)
      fail("a macro inside a loop, macro or {{% set %}} block is not supported");
    out.kind = Statement::Kind::kMacro;
    out.text = name();
    expect_op("(");
    while (!take_op(")")) {
      if (!out.parameters.empty()) {
        expect_op(",");
        if (take_op(")")) break;
      }
      std::string parameter = name();
      ExprPtr otherwise;
      if (take_op("="))
        otherwise = expression();
      else if (!out.parameters.empty() && out.parameters.back().second)
        fail("the parameter '{}' without a default follows one with a default", parameter);
      out.parameters.emplace_back(std::move(parameter), std::move(otherwise));
    }
    block_end();
    capture([&] { out.body = closed_body("endmacro"); });
  }

  template <typename F>
  void capture(F&& parse_body) {
    const int loops = std::exchange(loops_, 0);
    ++inside_capture_;
    parse_body();
    --inside_capture_;
    loops_ = loops;
  }

  Target target(bool attributes) {
    Target out;
    const bool brackets = take_op("(");
    out.names.push_back(name());
    if (attributes && !brackets && take_op(".")) {
      out.attribute = name();
      return out;
    }
    while (take_op(",")) {
      out.unpack = true;
      if (!is(Kind::kName) || is_name("in")) break;
      out.names.push_back(name());
    }
    if (brackets) {
      expect_op(")");
      out.unpack = out.unpack || out.names.size() > 1;
    }
    for (const std::string& each : out.names)
      if (reserved(each) || each == "loop") fail("'{}' cannot be assigned", each);
    return out;
  }

  int loops_ = 0;  // that break and continue can leave
  int inside_loop_ = 0;
  int inside_capture_ = 0;  // macros, set blocks: their text is not the output yet
  bool generation_ = false;
};

}  // namespace

Tree parse(std::string_view source, const std::string& name) {
  return Parser(source, name).run();
}

}  // namespace titanium::jinja
