// Jinja's grammar, as far as chat templates use it.
#include <algorithm>
#include <charconv>
#include <initializer_list>

#include "titanium/base/error.h"
#include "titanium/text/template_ast.h"
#include "titanium/text/template_builtins.h"
#include "titanium/text/template_lexer.h"

namespace titanium::jinja {
namespace {

constexpr int kMaxNesting = 200;    // of blocks and brackets
constexpr int kMaxExprDepth = 400;  // of an expression's tree
constexpr size_t kMaxSource = 1 << 20;

class Parser {
 public:
  Parser(std::string_view source, const std::string& name) : name_(name) {
    if (source.size() > kMaxSource)
      throw BadConfig("{}: a template of {} bytes; at most {}", name, source.size(), kMaxSource);
    tokens_ = lex(source, name);
  }

  Tree run() {
    Tree tree;
    tree.body = body({});
    tree.generation = generation_;
    return tree;
  }

 private:
  using Kind = Token::Kind;

  // Counts the nesting of the functions that call one another.
  struct Nested {
    explicit Nested(Parser& parser) : parser_(parser) {
      if (++parser.nesting_ > kMaxNesting) parser.fail("nested deeper than {}", kMaxNesting);
    }
    ~Nested() { --parser_.nesting_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    Parser& parser_;
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

  // ---- statements

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

  static bool reserved(std::string_view word) {
    for (const std::string_view each :
         {"true", "false", "none", "True", "False", "None", "and", "or", "not", "in", "is", "if", "else"})
      if (word == each) return true;
    return false;
  }

  // ---- expressions

  std::unique_ptr<Expr> make(Expr::Kind kind) const {
    auto out = std::make_unique<Expr>();
    out->kind = kind;
    out->line = now().line;
    return out;
  }

  ExprPtr done(std::unique_ptr<Expr> expr) const {
    auto grow = [&](const ExprPtr& child) {
      if (child) expr->depth = std::max(expr->depth, child->depth + 1);
    };
    for (const ExprPtr& child : expr->children) grow(child);
    for (const ExprPtr& argument : expr->arguments.positional) grow(argument);
    for (const auto& [key, argument] : expr->arguments.named) grow(argument);
    if (expr->depth > kMaxExprDepth) fail("an expression is nested deeper than {}", kMaxExprDepth);
    return expr;
  }

  template <typename... Children>
  ExprPtr node(Expr::Kind kind, Children... children) const {
    auto out = make(kind);
    (out->children.push_back(std::move(children)), ...);
    return done(std::move(out));
  }

  // With commas a tuple.
  ExprPtr expression_list(bool with_condition = true) {
    ExprPtr first = with_condition ? expression() : or_expression();
    if (!is_op(",")) return first;
    auto tuple = make(Expr::Kind::kTuple);
    tuple->children.push_back(std::move(first));
    while (take_op(",")) {
      if (is(Kind::kBlockEnd) || is(Kind::kPrintEnd)) break;
      tuple->children.push_back(with_condition ? expression() : or_expression());
    }
    return done(std::move(tuple));
  }

  ExprPtr expression() {
    const Nested nested(*this);
    ExprPtr out = or_expression();
    while (take_name("if")) {
      ExprPtr condition = or_expression();
      ExprPtr otherwise;
      if (take_name("else")) otherwise = expression();
      out = node(Expr::Kind::kIf, std::move(condition), std::move(out), std::move(otherwise));
    }
    return out;
  }

  ExprPtr or_expression() {
    ExprPtr out = and_expression();
    while (take_name("or")) out = node(Expr::Kind::kOr, std::move(out), and_expression());
    return out;
  }

  ExprPtr and_expression() {
    ExprPtr out = not_expression();
    while (take_name("and")) out = node(Expr::Kind::kAnd, std::move(out), not_expression());
    return out;
  }

  ExprPtr not_expression() {
    if (!take_name("not")) return compare();
    const Nested nested(*this);
    return node(Expr::Kind::kNot, not_expression());
  }

  ExprPtr compare() {
    ExprPtr first = sum();
    auto out = make(Expr::Kind::kCompare);
    out->children.push_back(std::move(first));
    for (;;) {
      std::string op;
      for (const std::string_view each : {"==", "!=", "<", "<=", ">", ">="})
        if (is_op(each)) op = each;
      if (is_name("in")) op = "in";
      if (is_name("not") && ahead().kind == Kind::kName && ahead().text == "in") {
        next();
        op = "not in";
      }
      if (op.empty()) break;
      next();
      out->names.push_back(op);
      out->children.push_back(sum());
    }
    if (out->names.empty()) return std::move(out->children[0]);
    return done(std::move(out));
  }

  ExprPtr binary(std::string op, ExprPtr left, ExprPtr right) const {
    auto out = make(Expr::Kind::kBinary);
    out->name = std::move(op);
    out->children.push_back(std::move(left));
    out->children.push_back(std::move(right));
    return done(std::move(out));
  }

  std::string take_any(std::initializer_list<std::string_view> ops) {
    for (const std::string_view op : ops)
      if (take_op(op)) return std::string(op);
    return "";
  }

  ExprPtr sum() {
    ExprPtr out = concat();
    for (std::string op = take_any({"+", "-"}); !op.empty(); op = take_any({"+", "-"}))
      out = binary(op, std::move(out), concat());
    return out;
  }

  ExprPtr concat() {
    ExprPtr first = product();
    if (!is_op("~")) return first;
    auto out = make(Expr::Kind::kConcat);
    out->children.push_back(std::move(first));
    while (take_op("~")) out->children.push_back(product());
    return done(std::move(out));
  }

  ExprPtr product() {
    ExprPtr out = power();
    for (std::string op = take_any({"*", "/", "//", "%"}); !op.empty(); op = take_any({"*", "/", "//", "%"}))
      out = binary(op, std::move(out), power());
    return out;
  }

  ExprPtr power() {
    ExprPtr out = unary(true);
    while (take_op("**")) out = binary("**", std::move(out), unary(true));
    return out;
  }

  ExprPtr unary(bool with_filters) {
    const Nested nested(*this);
    ExprPtr out;
    if (take_op("-"))
      out = node(Expr::Kind::kNegate, unary(false));
    else if (take_op("+"))
      out = node(Expr::Kind::kPlus, unary(false));
    else
      out = primary();
    out = postfix(std::move(out));
    if (!with_filters) return out;
    for (;;) {
      if (is_op("|")) {
        out = filters(std::move(out), false);
      } else if (is_name("is")) {
        out = test(std::move(out));
      } else if (is_op("(")) {
        out = call(std::move(out));
      } else {
        return out;
      }
    }
  }

  ExprPtr primary() {
    auto out = make(Expr::Kind::kConst);
    if (is(Kind::kName)) {
      const std::string word = now().text;
      if (word == "true" || word == "True") {
        out->value = Value(true);
      } else if (word == "false" || word == "False") {
        out->value = Value(false);
      } else if (word == "none" || word == "None") {
        out->value = Value(None{});
      } else if (reserved(word)) {
        fail("unexpected '{}'", word);
      } else {
        out->kind = Expr::Kind::kName;
        out->name = word;
      }
      next();
      return out;
    }
    if (is(Kind::kString)) {
      std::string text;
      for (; is(Kind::kString); next()) text += now().text;
      out->value = Value(std::move(text));
      return out;
    }
    if (is(Kind::kInteger) || is(Kind::kFloat)) {
      const std::string& text = now().text;
      std::from_chars_result read{};
      if (is(Kind::kInteger)) {
        int64_t value = 0;
        read = std::from_chars(text.data(), text.data() + text.size(), value);
        out->value = Value(value);
      } else {
        double value = 0;
        read = std::from_chars(text.data(), text.data() + text.size(), value);
        out->value = Value(value);
      }
      if (read.ec != std::errc()) fail("the number {} is too large", text);
      next();
      return out;
    }
    if (take_op("(")) {
      if (take_op(")")) {
        out->kind = Expr::Kind::kTuple;
        return out;
      }
      ExprPtr first = expression();
      if (take_op(")")) return first;
      out->kind = Expr::Kind::kTuple;
      out->children.push_back(std::move(first));
      while (!take_op(")")) {
        expect_op(",");
        if (take_op(")")) break;
        out->children.push_back(expression());
      }
      return done(std::move(out));
    }
    if (take_op("[")) {
      out->kind = Expr::Kind::kList;
      while (!take_op("]")) {
        if (!out->children.empty()) {
          expect_op(",");
          if (take_op("]")) break;
        }
        out->children.push_back(expression());
      }
      return done(std::move(out));
    }
    if (take_op("{")) {
      out->kind = Expr::Kind::kDict;
      while (!take_op("}")) {
        if (!out->children.empty()) {
          expect_op(",");
          if (take_op("}")) break;
        }
        out->children.push_back(expression());
        expect_op(":");
        out->children.push_back(expression());
      }
      return done(std::move(out));
    }
    fail("an expression is expected, not {}", shown());
  }

  ExprPtr postfix(ExprPtr out) {
    for (;;) {
      if (take_op(".")) {
        if (is(Kind::kInteger)) {
          auto index = make(Expr::Kind::kConst);
          int64_t value = 0;
          if (std::from_chars(now().text.data(), now().text.data() + now().text.size(), value).ec !=
              std::errc())
            fail("the number {} is too large", now().text);
          index->value = Value(value);
          next();
          out = node(Expr::Kind::kItem, std::move(out), ExprPtr(std::move(index)));
          continue;
        }
        auto attribute = make(Expr::Kind::kAttribute);
        attribute->name = name();
        attribute->children.push_back(std::move(out));
        out = done(std::move(attribute));
      } else if (take_op("[")) {
        out = subscript(std::move(out));
      } else if (is_op("(")) {
        out = call(std::move(out));
      } else {
        return out;
      }
    }
  }

  ExprPtr subscript(ExprPtr of) {
    ExprPtr parts[3];
    if (!is_op(":")) parts[0] = expression();
    if (take_op("]")) return node(Expr::Kind::kItem, std::move(of), std::move(parts[0]));
    for (int i = 1; i < 3 && take_op(":"); ++i)
      if (!is_op(":") && !is_op("]")) parts[i] = expression();
    expect_op("]");
    return node(Expr::Kind::kSlice, std::move(of), std::move(parts[0]), std::move(parts[1]),
                std::move(parts[2]));
  }

  Arguments arguments() {
    Arguments out;
    expect_op("(");
    bool first = true;
    while (!take_op(")")) {
      if (!first) {
        expect_op(",");
        if (take_op(")")) break;
      }
      first = false;
      if (is_op("*") || is_op("**")) fail("unpacked arguments ({}) are not supported", now().text);
      if (is(Kind::kName) && ahead().kind == Kind::kOperator && ahead().text == "=") {
        std::string key = name();
        next();
        out.named.emplace_back(std::move(key), expression());
      } else {
        if (!out.named.empty()) fail("an argument without a name follows one with a name");
        out.positional.push_back(expression());
      }
    }
    return out;
  }

  ExprPtr call(ExprPtr what) {
    auto out = make(Expr::Kind::kCall);
    out->children.push_back(std::move(what));
    out->arguments = arguments();
    return done(std::move(out));
  }

  // |a|b(c) after `of`; with `first_named` the first comes without its bar, as in a filter block.
  ExprPtr filters(ExprPtr of, bool first_named) {
    while (first_named || take_op("|")) {
      first_named = false;
      auto out = make(Expr::Kind::kFilter);
      out->name = name();
      if (!has_filter(out->name)) fail("the filter '{}' is not supported", out->name);
      out->children.push_back(std::move(of));
      if (is_op("(")) out->arguments = arguments();
      of = done(std::move(out));
    }
    return of;
  }

  ExprPtr test(ExprPtr of) {
    next();  // is
    const bool negated = take_name("not");
    auto out = make(Expr::Kind::kTest);
    out->name = name();
    if (!has_test(out->name)) fail("the test '{}' is not supported", out->name);
    out->children.push_back(std::move(of));
    if (is_op("(")) {
      out->arguments = arguments();
    } else if (is(Kind::kString) || is(Kind::kInteger) || is(Kind::kFloat) || is_op("[") || is_op("{") ||
               (is(Kind::kName) && !is_name("else") && !is_name("or") && !is_name("and") && !is_name("is") &&
                !is_name("if") && !is_name("in") && !is_name("not") && !is_name("recursive"))) {
      const Nested nested(*this);
      out->arguments.positional.push_back(postfix(primary()));
    }
    ExprPtr result = done(std::move(out));
    return negated ? node(Expr::Kind::kNot, std::move(result)) : std::move(result);
  }

  std::string name_;
  std::vector<Token> tokens_;
  size_t at_ = 0;
  int nesting_ = 0;
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
