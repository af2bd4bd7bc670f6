#include "titanium/text/template_builtins.h"
#include "titanium/text/template_text.h"

namespace titanium::jinja {
namespace {

using TestFunction = bool (*)(Run&, const Value&, const Value*);
struct TestEntry {
  std::string_view name;
  bool argument;
  TestFunction function;
};

int64_t whole_of(Run& run, const Value& value) {
  if (!value.integer()) run.bad_data("the test wants an integer, not {}", value.type());
  return value.whole();
}
bool t_callable(Run&, const Value& v, const Value*) {
  return v.object<Method>() != nullptr || std::string_view(v.type()) == "macro";
}
bool t_defined(Run&, const Value& v, const Value*) {
  return !v.undefined();
}
bool t_undefined(Run&, const Value& v, const Value*) {
  return v.undefined();
}
bool t_none(Run&, const Value& v, const Value*) {
  return v.none();
}
bool t_boolean(Run&, const Value& v, const Value*) {
  return v.is<bool>();
}
bool t_true(Run&, const Value& v, const Value*) {
  return v.is<bool>() && v.boolean();
}
bool t_false(Run&, const Value& v, const Value*) {
  return v.is<bool>() && !v.boolean();
}
bool t_string(Run&, const Value& v, const Value*) {
  return v.string();
}
bool t_number(Run&, const Value& v, const Value*) {
  return v.number();
}
bool t_integer(Run&, const Value& v, const Value*) {
  return v.is<int64_t>();
}
bool t_float(Run&, const Value& v, const Value*) {
  return v.is<double>();
}
bool t_mapping(Run&, const Value& v, const Value*) {
  return v.dict();
}
bool t_iterable(Run&, const Value& v, const Value*) {
  return v.list() || v.dict() || v.string() || v.undefined();
}
bool t_sequence(Run&, const Value& v, const Value*) {
  return (v.list() && !v.items().lazy) || v.dict() || v.string();
}
bool t_lower(Run&, const Value& v, const Value*) {
  return is_lower(str(v));
}
bool t_upper(Run&, const Value& v, const Value*) {
  return is_upper(str(v));
}
bool t_odd(Run& run, const Value& v, const Value*) {
  return whole_of(run, v) % 2 != 0;
}
bool t_even(Run& run, const Value& v, const Value*) {
  return whole_of(run, v) % 2 == 0;
}
bool t_divisible(Run& run, const Value& v, const Value* by) {
  if (whole_of(run, *by) == 0) run.bad_data("division by zero");
  return by->whole() == -1 || whole_of(run, v) % by->whole() == 0;
}
bool t_eq(Run&, const Value& v, const Value* other) {
  return v.equals(*other);
}
bool t_ne(Run&, const Value& v, const Value* other) {
  return !v.equals(*other);
}
bool t_lt(Run& run, const Value& v, const Value* other) {
  return less(run, v, *other);
}
bool t_gt(Run& run, const Value& v, const Value* other) {
  return less(run, *other, v);
}
bool t_le(Run& run, const Value& v, const Value* other) {
  return v.equals(*other) || less(run, v, *other);
}
bool t_ge(Run& run, const Value& v, const Value* other) {
  return v.equals(*other) || less(run, *other, v);
}
bool t_in(Run& run, const Value& v, const Value* holder) {
  return contains(run, *holder, v);
}
bool t_sameas(Run&, const Value& v, const Value* other) {
  return std::string_view(v.type()) == other->type() && v.equals(*other);
}

constexpr TestEntry kTests[] = {
    {"!=", true, t_ne},
    {"<", true, t_lt},
    {"<=", true, t_le},
    {"==", true, t_eq},
    {">", true, t_gt},
    {">=", true, t_ge},
    {"boolean", false, t_boolean},
    {"callable", false, t_callable},
    {"defined", false, t_defined},
    {"divisibleby", true, t_divisible},
    {"eq", true, t_eq},
    {"equalto", true, t_eq},
    {"even", false, t_even},
    {"false", false, t_false},
    {"float", false, t_float},
    {"ge", true, t_ge},
    {"greaterthan", true, t_gt},
    {"gt", true, t_gt},
    {"in", true, t_in},
    {"integer", false, t_integer},
    {"iterable", false, t_iterable},
    {"le", true, t_le},
    {"lessthan", true, t_lt},
    {"lower", false, t_lower},
    {"lt", true, t_lt},
    {"mapping", false, t_mapping},
    {"ne", true, t_ne},
    {"none", false, t_none},
    {"number", false, t_number},
    {"odd", false, t_odd},
    {"sameas", true, t_sameas},
    {"sequence", false, t_sequence},
    {"string", false, t_string},
    {"true", false, t_true},
    {"undefined", false, t_undefined},
    {"upper", false, t_upper},
};

const TestEntry* find_test(std::string_view name) {
  for (const TestEntry& entry : kTests)
    if (entry.name == name) return &entry;
  return nullptr;
}

}  // namespace

bool has_test(std::string_view name) {
  return find_test(name) != nullptr;
}

bool test(Run& run, std::string_view name, const Value& of, const Args& args) {
  run.step();
  const TestEntry* entry = find_test(name);
  if (!entry) run.bad_template("the test '{}' is not supported", name);
  if (args.positional.size() != (entry->argument ? 1u : 0u) || !args.named.empty())
    run.bad_template("the test '{}' wants {}", name, entry->argument ? "one argument" : "no argument");
  return entry->function(run, of, entry->argument ? &args.positional[0] : nullptr);
}

}  // namespace titanium::jinja
