#include "titanium/text/template_expressions.h"

#include <algorithm>
#include <charconv>

#include "titanium/text/template_builtins.h"

namespace titanium::jinja {
namespace {

constexpr int kMaxExprDepth = 400;  // of an expression's tree

}  // namespace

bool ExpressionParser::reserved(std::string_view word) {
  for (const std::string_view each :
       {"true", "false", "none", "True", "False", "None", "and", "or", "not", "in", "is", "if", "else"})
    if (word == each) return true;
  return false;
}

std::unique_ptr<Expr> ExpressionParser::make(Expr::Kind kind) const {
  auto out = std::make_unique<Expr>();
  out->kind = kind;
  out->line = now().line;
  return out;
}

ExprPtr ExpressionParser::done(std::unique_ptr<Expr> expr) const {
  auto grow = [&](const ExprPtr& child) {
    if (child) expr->depth = std::max(expr->depth, child->depth + 1);
  };
  for (const ExprPtr& child : expr->children) grow(child);
  for (const ExprPtr& argument : expr->arguments.positional) grow(argument);
  for (const auto& [key, argument] : expr->arguments.named) grow(argument);
  if (expr->depth > kMaxExprDepth) fail("an expression is nested deeper than {}", kMaxExprDepth);
  return expr;
}

ExprPtr ExpressionParser::expression_list(bool with_condition) {
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

ExprPtr ExpressionParser::expression() {
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

ExprPtr ExpressionParser::or_expression() {
  ExprPtr out = and_expression();
  while (take_name("or")) out = node(Expr::Kind::kOr, std::move(out), and_expression());
  return out;
}

ExprPtr ExpressionParser::and_expression() {
  ExprPtr out = not_expression();
  while (take_name("and")) out = node(Expr::Kind::kAnd, std::move(out), not_expression());
  return out;
}

ExprPtr ExpressionParser::not_expression() {
  if (!take_name("not")) return compare();
  const Nested nested(*this);
  return node(Expr::Kind::kNot, not_expression());
}

ExprPtr ExpressionParser::compare() {
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

ExprPtr ExpressionParser::binary(std::string op, ExprPtr left, ExprPtr right) const {
  auto out = make(Expr::Kind::kBinary);
  out->name = std::move(op);
  out->children.push_back(std::move(left));
  out->children.push_back(std::move(right));
  return done(std::move(out));
}

std::string ExpressionParser::take_any(std::initializer_list<std::string_view> ops) {
  for (const std::string_view op : ops)
    if (take_op(op)) return std::string(op);
  return "";
}

ExprPtr ExpressionParser::sum() {
  ExprPtr out = concat();
  for (std::string op = take_any({"+", "-"}); !op.empty(); op = take_any({"+", "-"}))
    out = binary(op, std::move(out), concat());
  return out;
}

ExprPtr ExpressionParser::concat() {
  ExprPtr first = product();
  if (!is_op("~")) return first;
  auto out = make(Expr::Kind::kConcat);
  out->children.push_back(std::move(first));
  while (take_op("~")) out->children.push_back(product());
  return done(std::move(out));
}

ExprPtr ExpressionParser::product() {
  ExprPtr out = power();
  for (std::string op = take_any({"*", "/", "//", "%"}); !op.empty(); op = take_any({"*", "/", "//", "%"}))
    out = binary(op, std::move(out), power());
  return out;
}

ExprPtr ExpressionParser::power() {
  ExprPtr out = unary(true);
  while (take_op("**")) out = binary("**", std::move(out), unary(true));
  return out;
}

ExprPtr ExpressionParser::unary(bool with_filters) {
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

ExprPtr ExpressionParser::primary() {
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

ExprPtr ExpressionParser::postfix(ExprPtr out) {
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

ExprPtr ExpressionParser::subscript(ExprPtr of) {
  ExprPtr parts[3];
  if (!is_op(":")) parts[0] = expression();
  if (take_op("]")) return node(Expr::Kind::kItem, std::move(of), std::move(parts[0]));
  for (int i = 1; i < 3 && take_op(":"); ++i)
    if (!is_op(":") && !is_op("]")) parts[i] = expression();
  expect_op("]");
  return node(Expr::Kind::kSlice, std::move(of), std::move(parts[0]), std::move(parts[1]),
              std::move(parts[2]));
}

Arguments ExpressionParser::arguments() {
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

ExprPtr ExpressionParser::call(ExprPtr what) {
  auto out = make(Expr::Kind::kCall);
  out->children.push_back(std::move(what));
  out->arguments = arguments();
  return done(std::move(out));
}

ExprPtr ExpressionParser::filters(ExprPtr of, bool first_named) {
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

ExprPtr ExpressionParser::test(ExprPtr of) {
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

}  // namespace titanium::jinja
