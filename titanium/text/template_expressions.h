// Jinja's grammar, as far as chat templates use it: the expressions.
#pragma once
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "titanium/text/template_ast.h"
#include "titanium/text/template_cursor.h"

namespace titanium::jinja {

// Each method reads one production from the front of the tokens; BadConfig for what the grammar has not.
class ExpressionParser : protected TokenCursor {
 protected:
  using TokenCursor::TokenCursor;

  // With commas a tuple.
  ExprPtr expression_list(bool with_condition = true);
  ExprPtr expression();

  // |a|b(c) after `of`; with `first_named` the first comes without its bar, as in a filter block.
  ExprPtr filters(ExprPtr of, bool first_named);

  static bool reserved(std::string_view word);

 private:
  // From the weakest binding to the strongest.
  ExprPtr or_expression();
  ExprPtr and_expression();
  ExprPtr not_expression();
  ExprPtr compare();
  ExprPtr sum();
  ExprPtr concat();
  ExprPtr product();
  ExprPtr power();
  ExprPtr unary(bool with_filters);
  ExprPtr primary();

  // What may follow an operand.
  ExprPtr postfix(ExprPtr out);
  ExprPtr subscript(ExprPtr of);
  ExprPtr call(ExprPtr what);
  ExprPtr test(ExprPtr of);
  Arguments arguments();

  // Nodes of the tree; done() refuses one that is too deep.
  std::unique_ptr<Expr> make(Expr::Kind kind) const;
  ExprPtr done(std::unique_ptr<Expr> expr) const;
  ExprPtr binary(std::string op, ExprPtr left, ExprPtr right) const;
  template <typename... Children>
  ExprPtr node(Expr::Kind kind, Children... children) const {
    auto out = make(kind);
    (out->children.push_back(std::move(children)), ...);
    return done(std::move(out));
  }

  std::string take_any(std::initializer_list<std::string_view> ops);
};

}  // namespace titanium::jinja
