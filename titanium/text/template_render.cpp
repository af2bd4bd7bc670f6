#include "titanium/text/template_render.h"

#include <algorithm>
#include <memory>

namespace titanium::jinja {
namespace {

constexpr int kMaxRecursion = 1000;  // of eval and exec together

struct Macro final : Object {
  const Statement* statement = nullptr;
  const char* type() const override { return "macro"; }
};
struct Function final : Object {
  std::string name;
  const char* type() const override { return "function"; }
};

// Variables by name; a block that assigns has a scope of its own inside another.
struct Scope {
  explicit Scope(Scope* outer) : outer(outer) {}
  std::vector<std::pair<std::string, Value>> variables;
  Scope* outer;

  void set(const std::string& name, Value value) {
    for (auto& [known, old] : variables) {
      if (known != name) continue;
      old = std::move(value);
      return;
    }
    variables.emplace_back(name, std::move(value));
  }
  const Value* find(std::string_view name) const {
    for (const Scope* scope = this; scope; scope = scope->outer)
      for (const auto& [known, value] : scope->variables)
        if (known == name) return &value;
    return nullptr;
  }
};

enum class Flow { kNext, kBreak, kContinue };

class Renderer {
 public:
  Renderer(Run& run, std::vector<std::pair<std::string, Value>> variables) : run_(run), global_(nullptr) {
    global_.variables = std::move(variables);
  }
  // Namespaces can hold one another in a circle or a long chain.
  ~Renderer() {
    for (const auto& space : namespaces_) space->fields.clear();
  }
  Renderer(const Renderer&) = delete;
  Renderer& operator=(const Renderer&) = delete;

  RenderedChat render(const Tree& tree) {
    scope_ = &global_;
    out_ = &result_.text;
    exec(tree.body);
    return std::move(result_);
  }

 private:
  struct Nested {
    explicit Nested(Renderer& renderer) : renderer_(renderer) {
      if (++renderer_.recursion_ > kMaxRecursion)
        renderer_.run_.bad_template("the template recurses too deeply");
    }
    ~Nested() { --renderer_.recursion_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;
    Renderer& renderer_;
  };
  // Puts another scope or output in place for a while.
  template <typename T>
  struct Swapped {
    Swapped(T& place, T value) : place_(place), old_(place) { place = value; }
    ~Swapped() { place_ = old_; }
    Swapped(const Swapped&) = delete;
    Swapped& operator=(const Swapped&) = delete;
    T& place_;
    T old_;
  };

  // ---- statements

  Flow exec(const Body& body) {
    for (const auto& statement : body) {
      const Flow flow = exec(*statement);
      if (flow != Flow::kNext) return flow;
    }
    return Flow::kNext;
  }

  Flow exec(const Statement& s) {
    const Nested nested(*this);
    run_.step();
    run_.line = s.line;
    switch (s.kind) {
      case Statement::Kind::kText:
        write(s.text);
        return Flow::kNext;
      case Statement::Kind::kPrint:
        print(s);
        return Flow::kNext;
      case Statement::Kind::kIf:
        for (const auto& [condition, body] : s.branches)
          if (eval(*condition).truthy()) return exec(body);
        return exec(s.otherwise);
      case Statement::Kind::kFor:
        return loop(s);
      case Statement::Kind::kSet:
        assign(*scope_, s.target, eval(*s.expr));
        return Flow::kNext;
      case Statement::Kind::kSetBlock: {
        Value value = text_value(run_, captured(s.body));
        if (s.expr) value = filtered(*s.expr, value);
        assign(*scope_, s.target, std::move(value));
        return Flow::kNext;
      }
      case Statement::Kind::kFilter:
        write(str(filtered(*s.expr, text_value(run_, captured(s.body)))));
        return Flow::kNext;
      case Statement::Kind::kMacro: {
        auto macro = std::make_shared<Macro>();
        macro->statement = &s;
        scope_->set(s.text, Value(Value::ObjectRef(std::move(macro))));
        return Flow::kNext;
      }
      case Statement::Kind::kGeneration: {
        Scope inner(scope_);
        const Swapped<Scope*> scope(scope_, &inner);
        const auto begin = static_cast<int64_t>(out_->size());
        exec(s.body);
        result_.generation.push_back({begin, static_cast<int64_t>(out_->size())});
        return Flow::kNext;
      }
      case Statement::Kind::kBreak:
        return Flow::kBreak;
      case Statement::Kind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kNext;
  }

  void write(std::string_view text) {
    run_.check_output(out_->size() + text.size());
    run_.step(static_cast<int64_t>(text.size() / 256));
    *out_ += text;
  }

  void print(const Statement& s) {
    const Value value = eval(*s.expr);
    run_.line = s.line;
    if (value.string()) {
      write(value.text());
      return;
    }
    run_.charge(4 * value.extent().size);
    write(str(value));
  }

  std::string captured(const Body& body) {
    Scope inner(scope_);
    std::string text;
    const Swapped<Scope*> scope(scope_, &inner);
    const Swapped<std::string*> out(out_, &text);
    exec(body);
    return text;
  }

  void assign(Scope& scope, const Target& target, Value value) {
    if (!target.attribute.empty()) {
      const Value* holder = scope.find(target.names[0]);
      const auto space = holder ? holder->object<Namespace>() : nullptr;
      if (!space)
        run_.bad_template("'{}' is not a namespace, so '{}.{}' cannot be set", target.names[0],
                          target.names[0], target.attribute);
      space->fields[target.attribute] = std::move(value);
      return;
    }
    if (!target.unpack) {
      scope.set(target.names[0], std::move(value));
      return;
    }
    const std::vector<Value> parts = iterate(run_, value);
    if (parts.size() != target.names.size())
      run_.bad_data("{} values are unpacked into {} names", parts.size(), target.names.size());
    for (size_t i = 0; i < parts.size(); ++i) scope.set(target.names[i], parts[i]);
  }

  Flow loop(const Statement& s) {
    std::vector<Value> items = iterate(run_, eval(*s.expr));
    if (s.condition) {
      std::vector<Value> kept;
      for (Value& each : items) {
        run_.step();
        Scope inner(scope_);
        assign(inner, s.target, each);
        const Swapped<Scope*> scope(scope_, &inner);
        if (eval(*s.condition).truthy()) kept.push_back(std::move(each));
      }
      items = std::move(kept);
    }
    if (items.empty()) return exec(s.otherwise);

    auto state = std::make_shared<Loop>();
    for (const Value& each : items) Value::grow(state->extent, each);
    state->items = std::move(items);
    const Value variable{Value::ObjectRef(state)};
    for (state->index = 0; state->index < state->items.size(); ++state->index) {
      run_.step();
      Scope inner(scope_);
      inner.set("loop", variable);
      assign(inner, s.target, state->items[state->index]);
      const Swapped<Scope*> scope(scope_, &inner);
      if (exec(s.body) == Flow::kBreak) break;
    }
    return Flow::kNext;
  }

  // ---- expressions

  Value eval(const Expr& e) {
    const Nested nested(*this);
    run_.step();
    run_.line = e.line;
    switch (e.kind) {
      case Expr::Kind::kConst:
        return e.value;
      case Expr::Kind::kName:
        return lookup(e.name);
      case Expr::Kind::kList:
        return list_value(run_, all(e.children));
      case Expr::Kind::kTuple:
        return list_value(run_, all(e.children), true);
      case Expr::Kind::kDict:
        return dict(e);
      case Expr::Kind::kAttribute: {
        const Value of = eval(*e.children[0]);
        run_.line = e.line;
        if (of.undefined())
          run_.bad_data("{} is undefined, so it has no attribute '{}'", shown(*e.children[0]), e.name);
        return attribute(run_, of, e.name);
      }
      case Expr::Kind::kItem:
        return subscript(e);
      case Expr::Kind::kSlice: {
        const Value of = eval(*e.children[0]);
        auto part = [&](size_t i) { return e.children[i] ? eval(*e.children[i]) : Value(None{}); };
        const Value begin = part(1), end = part(2), step = part(3);
        return slice(run_, of, begin, end, step);
      }
      case Expr::Kind::kCall:
        return call(e);
      case Expr::Kind::kFilter:
        return filter(run_, e.name, eval(*e.children[0]), arguments(e));
      case Expr::Kind::kTest:
        return is(e);
      case Expr::Kind::kNot:
        return !eval(*e.children[0]).truthy();
      case Expr::Kind::kNegate:
        return signed_number(e, true);
      case Expr::Kind::kPlus:
        return signed_number(e, false);
      case Expr::Kind::kAnd: {
        Value left = eval(*e.children[0]);
        return left.truthy() ? eval(*e.children[1]) : left;
      }
      case Expr::Kind::kOr: {
        Value left = eval(*e.children[0]);
        return left.truthy() ? left : eval(*e.children[1]);
      }
      case Expr::Kind::kIf:
        if (eval(*e.children[0]).truthy()) return eval(*e.children[1]);
        return e.children[2] ? eval(*e.children[2]) : Value();
      case Expr::Kind::kConcat:
        return concat(e);
      case Expr::Kind::kBinary: {
        const Value left = eval(*e.children[0]), right = eval(*e.children[1]);
        run_.line = e.line;
        return arithmetic(run_, e.name, left, right);
      }
      case Expr::Kind::kCompare:
        return compare(e);
    }
    return {};
  }

  Value lookup(const std::string& name) {
    if (const Value* found = scope_->find(name)) return *found;
    if (!has_function(name)) return {};
    auto function = std::make_shared<Function>();
    function->name = name;
    return Value(Value::ObjectRef(std::move(function)));
  }

  std::vector<Value> all(const std::vector<ExprPtr>& expressions) {
    std::vector<Value> out;
    out.reserve(expressions.size());
    for (const ExprPtr& each : expressions) out.push_back(eval(*each));
    return out;
  }

  Value dict(const Expr& e) {
    Dict out;
    for (size_t i = 0; i + 1 < e.children.size(); i += 2) {
      const Value key = eval(*e.children[i]);
      if (!key.string()) run_.bad_template("the key of a mapping is to be a text, not {}", key.type());
      Value value = eval(*e.children[i + 1]);
      const auto found = std::find_if(out.items.begin(), out.items.end(),
                                      [&](const auto& entry) { return entry.first == key.text(); });
      if (found != out.items.end())
        found->second = std::move(value);
      else
        out.items.emplace_back(key.text(), std::move(value));
    }
    run_.charge(static_cast<int64_t>(out.items.size() * sizeof(out.items[0])) + 64);
    return Value(std::move(out));
  }

  Value subscript(const Expr& e) {
    const Value of = eval(*e.children[0]), key = eval(*e.children[1]);
    run_.line = e.line;
    if (of.undefined())
      run_.bad_data("{} is undefined, so it has no item {}", shown(*e.children[0]), repr(key));
    return item(run_, of, key);
  }

  Value signed_number(const Expr& e, bool negative) {
    const Value value = eval(*e.children[0]);
    if (!value.number()) run_.bad_data("a sign before a value of type {}", value.type());
    if (negative)
      return value.is<double>() ? Value(-value.real()) : arithmetic(run_, "-", Value(int64_t{0}), value);
    return value.is<double>() ? value : Value(value.whole());
  }

  Value concat(const Expr& e) {
    std::string out;
    for (const ExprPtr& child : e.children) {
      const Value value = eval(*child);
      run_.charge(value.string() ? value.extent().size : 4 * value.extent().size);
      out += str(value);
    }
    return Value(std::move(out));
  }

  Value is(const Expr& e) {
    const Value of = eval(*e.children[0]);
    const Args args = arguments(e);
    run_.line = e.line;
    return test(run_, e.name, of, args);
  }

  Value compare(const Expr& e) {
    Value left = eval(*e.children[0]);
    for (size_t i = 0; i < e.names.size(); ++i) {
      Value right = eval(*e.children[i + 1]);
      run_.line = e.line;
      run_.step(std::min(left.extent().size, right.extent().size) / 64);
      const std::string& op = e.names[i];
      const bool holds = op == "=="   ? left.equals(right)
                         : op == "!=" ? !left.equals(right)
                         : op == "<"  ? less(run_, left, right)
                         : op == ">"  ? less(run_, right, left)
                         : op == "<=" ? less_or_equal(left, right)
                         : op == ">=" ? less_or_equal(right, left)
                         : op == "in" ? contains(run_, right, left)
                                      : !contains(run_, right, left);
      if (!holds) return false;
      left = std::move(right);
    }
    return true;
  }
  bool less_or_equal(const Value& a, const Value& b) {
    return (a.number() && b.number() && a.equals(b)) || less(run_, a, b) || (!a.number() && a.equals(b));
  }

  Args arguments(const Expr& e) {
    Args out;
    out.positional = all(e.arguments.positional);
    for (const auto& [name, value] : e.arguments.named) out.named.emplace_back(name, eval(*value));
    run_.line = e.line;
    return out;
  }

  // The chain of filters of a set or filter block: its innermost has no child.
  Value filtered(const Expr& e, const Value& text) {
    const Nested nested(*this);
    const Value of = e.children[0] ? filtered(*e.children[0], text) : text;
    return filter(run_, e.name, of, arguments(e));
  }

  Value call(const Expr& e) {
    const Expr& callee = *e.children[0];
    if (callee.kind == Expr::Kind::kAttribute) {
      const Value of = eval(*callee.children[0]);
      run_.line = e.line;
      if (of.undefined())
        run_.bad_data("{} is undefined, so it has no method '{}'", shown(*callee.children[0]), callee.name);
      if (const auto space = of.object<Namespace>()) {
        const auto found = space->fields.find(callee.name);
        if (found != space->fields.end()) return call_value(e, found->second);
      }
      return method(run_, of, callee.name, arguments(e));
    }
    const Value what = eval(callee);
    run_.line = e.line;
    if (what.undefined()) run_.bad_template("the function {} is not defined", shown(callee));
    return call_value(e, what);
  }

  Value call_value(const Expr& e, const Value& what) {
    if (const auto macro = what.object<Macro>()) return call_macro(*macro->statement, arguments(e));
    const auto named = what.object<Function>();
    if (!named) run_.bad_template("{} of type {} cannot be called", shown(*e.children[0]), what.type());
    if (named->name != "namespace") return function(run_, named->name, arguments(e));

    const Args args = arguments(e);
    auto space = std::make_shared<Namespace>();
    if (args.positional.size() > 1 || (args.positional.size() == 1 && !args.positional[0].dict()))
      run_.bad_template("namespace wants named arguments or one mapping");
    if (!args.positional.empty())
      for (const auto& [key, value] : args.positional[0].fields().items) space->fields[key] = value;
    for (const auto& [key, value] : args.named) space->fields[key] = value;
    run_.charge(static_cast<int64_t>((space->fields.size() + 2) * 128));
    namespaces_.push_back(space);
    return Value(Value::ObjectRef(std::move(space)));
  }

  Value call_macro(const Statement& macro, Args args) {
    Scope inner(&global_);
    if (args.positional.size() > macro.parameters.size())
      run_.bad_template("the macro '{}' takes {} arguments, not {}", macro.text, macro.parameters.size(),
                        args.positional.size());
    for (const auto& [name, value] : args.named)
      if (std::none_of(macro.parameters.begin(), macro.parameters.end(),
                       [&, &name = name](const auto& parameter) { return parameter.first == name; }))
        run_.bad_template("the macro '{}' has no parameter '{}'", macro.text, name);
    const Swapped<Scope*> scope(scope_, &inner);
    for (size_t i = 0; i < macro.parameters.size(); ++i) {
      const auto& [name, otherwise] = macro.parameters[i];
      if (i < args.positional.size()) {
        inner.set(name, args.positional[i]);
        continue;
      }
      const auto given =
          std::find_if(args.named.begin(), args.named.end(),
                       [&, &name = name](const auto& argument) { return argument.first == name; });
      if (given != args.named.end())
        inner.set(name, given->second);
      else
        inner.set(name, otherwise ? eval(*otherwise) : Value());
    }
    std::string text;
    const Swapped<std::string*> out(out_, &text);
    exec(macro.body);
    return text_value(run_, std::move(text));
  }

  // An expression, for messages.
  static std::string shown(const Expr& e) {
    switch (e.kind) {
      case Expr::Kind::kName:
        return "'" + e.name + "'";
      case Expr::Kind::kAttribute:
        return "'." + e.name + "'";
      case Expr::Kind::kItem:
        return e.children[1]->kind == Expr::Kind::kConst ? "[" + repr(e.children[1]->value) + "]" : "an item";
      default:
        return "a value";
    }
  }

  Run& run_;
  Scope global_;
  Scope* scope_ = nullptr;
  std::string* out_ = nullptr;
  RenderedChat result_;
  int recursion_ = 0;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
};

}  // namespace

RenderedChat render(const Tree& tree, Run& run, std::vector<std::pair<std::string, Value>> variables) {
  return Renderer(run, std::move(variables)).render(tree);
}

}  // namespace titanium::jinja
