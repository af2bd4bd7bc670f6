#include "titanium/text/template_builtins.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>

#include "titanium/text/template_text.h"
#include "titanium/text/unicode.h"

namespace titanium::jinja {
namespace {

// Arguments by position or name, taken in the order of the parameters.
class Params {
 public:
  Params(Run& run, std::string_view what, const Args& args) : run_(run), what_(what), args_(args) {}

  const Value* find(std::string_view name) {
    const size_t position = position_++;
    if (position < args_.positional.size()) return &args_.positional[position];
    for (const auto& [key, value] : args_.named) {
      if (key != name) continue;
      ++named_;
      return &value;
    }
    return nullptr;
  }
  Value get(std::string_view name, Value otherwise) {
    const Value* found = find(name);
    return found ? *found : otherwise;
  }
  const Value& need(std::string_view name) {
    const Value* found = find(name);
    if (!found) run_.bad_template("{} wants an argument '{}'", what_, name);
    return *found;
  }
  std::string text(std::string_view name, const char* otherwise) {
    const Value* found = find(name);
    return found ? str(*found) : std::string(otherwise);
  }
  std::optional<std::string> text_or_none(std::string_view name) {
    const Value* found = find(name);
    if (!found || found->none()) return std::nullopt;
    if (!found->string()) run_.bad_data("{}: '{}' is to be a text, not {}", what_, name, found->type());
    return found->text();
  }
  int64_t whole(std::string_view name, int64_t otherwise) {
    const Value* found = find(name);
    if (!found) return otherwise;
    if (!found->integer()) run_.bad_data("{}: '{}' is to be an integer, not {}", what_, name, found->type());
    return found->whole();
  }
  bool flag(std::string_view name, bool otherwise) {
    const Value* found = find(name);
    return found ? found->truthy() : otherwise;
  }
  // After the last parameter.
  void done() const {
    if (args_.positional.size() > position_) run_.bad_template("{} has too many arguments", what_);
    if (named_ < args_.named.size()) run_.bad_template("{} does not know one of its named arguments", what_);
  }

 private:
  Run& run_;
  std::string_view what_;
  const Args& args_;
  size_t position_ = 0, named_ = 0;
};

Value texts(Run& run, const std::vector<std::string_view>& parts) {
  std::vector<Value> out;
  for (const std::string_view part : parts) {
    run.charge(static_cast<int64_t>(part.size()) + 64);
    out.emplace_back(std::string(part));
  }
  return list_value(run, std::move(out));
}

Value lazy(Run& run, std::vector<Value> items) {
  run.charge(static_cast<int64_t>(items.size() * sizeof(Value)) + 64);
  return Value(List{std::move(items), false, true});
}

Value replaced(Run& run, std::string_view text, const std::string& what, const std::string& by,
               int64_t limit) {
  int64_t count = what.empty() ? count_chars(text) + 1 : 0;
  if (!what.empty())
    for (size_t at = text.find(what); at != std::string_view::npos; at = text.find(what, at + what.size()))
      ++count;
  if (limit >= 0) count = std::min(count, limit);
  run.charge(static_cast<int64_t>(text.size()) + count * static_cast<int64_t>(by.size()) + 64);
  return Value(replace(text, what, by, limit));
}

// attribute="a.b.0" of map, sort, join and others.
Value path(Run& run, Value of, const Value& attribute_path) {
  if (attribute_path.integer()) return item(run, of, attribute_path);
  const std::string text = str(attribute_path), dot = ".";
  for (const std::string_view part : split(text, &dot, -1, false)) {
    int64_t index = 0;
    const auto read = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool number = !part.empty() && read.ec == std::errc() && read.ptr == part.data() + part.size();
    of = number ? item(run, of, Value(index)) : item(run, of, Value(std::string(part)));
  }
  return of;
}

// What sort, min, max and unique compare.
Value sort_key(Run& run, const Value& of, const Value* attribute_path, bool case_sensitive) {
  Value key = attribute_path ? path(run, of, *attribute_path) : of;
  if (!case_sensitive && key.string()) return text_value(run, lower(key.text()));
  return key;
}

int64_t length(Run& run, const Value& of) {
  if (of.string()) return count_chars(of.text());
  if (of.list() && !of.items().lazy) return static_cast<int64_t>(of.items().items.size());
  if (of.dict()) return static_cast<int64_t>(of.fields().items.size());
  if (of.undefined()) return 0;
  run.bad_data("a value of type {} has no length", of.type());
}

std::vector<Value> pairs(Run& run, const Value& of) {
  std::vector<Value> out;
  if (of.undefined()) return out;
  if (!of.dict()) run.bad_data("items wants a mapping, not {}", of.type());
  for (const auto& [key, value] : of.fields().items) {
    run.charge(static_cast<int64_t>(key.size() + 3 * sizeof(Value)));
    out.emplace_back(List{{Value(key), value}, true, false});
  }
  return out;
}

Value f_trim(Run& run, const Value& of, Params& p) {
  const auto characters = p.text_or_none("chars");
  const std::string text = str(of);
  return text_value(run, std::string(strip(text, characters ? &*characters : nullptr, Side::kBoth)));
}

Value f_tojson(Run& run, const Value& of, Params& p) {
  JsonStyle style;
  style.ascii = p.flag("ensure_ascii", false);
  const Value indent = p.get("indent", None{});
  const Value separators = p.get("separators", None{});
  style.sort_keys = p.flag("sort_keys", false);
  if (!indent.none()) {
    if (!indent.integer() || indent.whole() > 64) run.bad_data("tojson: indent is to be an integer up to 64");
    style.indent = static_cast<int>(std::max<int64_t>(0, indent.whole()));
    style.item_separator = ",";
  }
  if (!separators.none()) {
    if (!separators.list() || separators.items().items.size() != 2)
      run.bad_data("tojson: separators is to be a pair of texts");
    style.item_separator = str(separators.items().items[0]);
    style.key_separator = str(separators.items().items[1]);
  }
  const auto most = 2 + of.extent().depth * std::max(0, style.indent) +
                    static_cast<int64_t>(style.item_separator.size() + style.key_separator.size());
  run.charge(of.extent().size * most);
  return Value(to_json(of, style));
}

Value f_length(Run& run, const Value& of, Params&) {
  return length(run, of);
}
Value f_upper(Run& run, const Value& of, Params&) {
  return text_value(run, upper(str(of)));
}
Value f_lower(Run& run, const Value& of, Params&) {
  return text_value(run, lower(str(of)));
}
Value f_string(Run& run, const Value& of, Params&) {
  return text_value(run, str(of));
}

Value f_capitalize(Run& run, const Value& of, Params&) {
  return text_value(run, capitalize(str(of)));
}

// Jinja's title keeps to its own idea of a word.
Value f_title(Run& run, const Value& of, Params&) {
  const std::string text = str(of);
  std::string out;
  size_t word = 0;
  auto flush = [&](size_t end) { out += capitalize(std::string_view(text).substr(word, end - word)); };
  for (size_t i = 0; i < text.size();) {
    const auto [code, size] = unicode::at(text, i);
    if (code == '-' || code == '(' || code == '{' || code == '[' || code == '<' || is_python_space(code)) {
      flush(i);
      out.append(text, i, size);
      word = i + size;
    }
    i += size;
  }
  flush(text.size());
  return text_value(run, out);
}

Value f_join(Run& run, const Value& of, Params& p) {
  const std::string separator = p.text("d", "");
  const Value* by = p.find("attribute");
  std::string out;
  bool first = true;
  for (const Value& each : iterate(run, of)) {
    const Value shown = by ? path(run, each, *by) : each;
    run.charge(static_cast<int64_t>(separator.size()) + shown.extent().size * 4);
    if (!first) out += separator;
    first = false;
    out += str(shown);
  }
  return Value(std::move(out));
}

Value f_first(Run& run, const Value& of, Params&) {
  const auto items = iterate(run, of);
  return items.empty() ? Value() : items.front();
}
Value f_last(Run& run, const Value& of, Params&) {
  const auto items = iterate(run, of);
  return items.empty() ? Value() : items.back();
}
Value f_list(Run& run, const Value& of, Params&) {
  return list_value(run, iterate(run, of));
}
Value f_items(Run& run, const Value& of, Params&) {
  return lazy(run, pairs(run, of));
}
Value f_safe(Run&, const Value& of, Params&) {
  return of;
}

Value f_replace(Run& run, const Value& of, Params& p) {
  const std::string what = str(p.need("old")), by = str(p.need("new"));
  const Value count = p.get("count", None{});
  if (!count.none() && !count.integer()) run.bad_data("replace: 'count' is to be an integer");
  return replaced(run, str(of), what, by, count.none() ? -1 : count.whole());
}

Value f_default(Run&, const Value& of, Params& p) {
  const Value otherwise = p.get("default_value", Value(""));
  const bool falsy_too = p.flag("boolean", false);
  return of.undefined() || (falsy_too && !of.truthy()) ? otherwise : of;
}

std::optional<double> read_real(std::string_view text) {
  text = strip(text, nullptr, Side::kBoth);
  if (text.starts_with('+')) text.remove_prefix(1);
  double value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || read.ec != std::errc() || read.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

Value f_int(Run&, const Value& of, Params& p) {
  const Value otherwise = p.get("default", Value(int64_t{0}));
  if (of.integer()) return of.whole();
  std::optional<double> real;
  if (of.is<double>()) real = of.real();
  if (of.string()) {
    std::string_view text = strip(of.text(), nullptr, Side::kBoth);
    if (text.starts_with('+')) text.remove_prefix(1);
    int64_t value = 0;
    const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
    if (!text.empty() && read.ec == std::errc() && read.ptr == text.data() + text.size()) return value;
    real = read_real(of.text());
  }
  return real && std::abs(*real) < 9.2e18 ? Value(static_cast<int64_t>(*real)) : otherwise;
}

Value f_float(Run&, const Value& of, Params& p) {
  const Value otherwise = p.get("default", Value(0.0));
  if (of.number()) return of.real();
  const auto real = of.string() ? read_real(of.text()) : std::nullopt;
  return real ? Value(*real) : otherwise;
}

Value f_abs(Run& run, const Value& of, Params&) {
  if (!of.number()) run.bad_data("abs wants a number, not {}", of.type());
  if (of.is<double>()) return std::abs(of.real());
  return of.whole() < 0 ? arithmetic(run, "-", Value(int64_t{0}), of) : Value(of.whole());
}

Value f_round(Run& run, const Value& of, Params& p) {
  const int64_t digits = p.whole("precision", 0);
  const std::string how = p.text("method", "common");
  if (!of.number()) run.bad_data("round wants a number, not {}", of.type());
  if (digits < 0 || digits > 15) run.bad_data("round: precision is to be from 0 to 15, not {}", digits);
  const double scale = std::pow(10.0, static_cast<double>(digits));
  if (how == "ceil") return std::ceil(of.real() * scale) / scale;
  if (how == "floor") return std::floor(of.real() * scale) / scale;
  if (how != "common") run.bad_data("round: method is to be common, ceil or floor, not '{}'", how);
  double value = of.real();  // as Python, which rounds the exact decimal value, halves to even
  const std::string shown = fmt::format("{:.{}f}", value, static_cast<int>(digits));
  std::from_chars(shown.data(), shown.data() + shown.size(), value);
  return value;
}

Value f_sum(Run& run, const Value& of, Params& p) {
  const Value* by = p.find("attribute");
  Value out = p.get("start", Value(int64_t{0}));
  for (const Value& each : iterate(run, of))
    out = arithmetic(run, "+", out, by && !by->none() ? path(run, each, *by) : each);
  return out;
}

Value extreme(Run& run, const Value& of, Params& p, bool largest) {
  const bool case_sensitive = p.flag("case_sensitive", false);
  const Value* by = p.find("attribute");
  Value best, best_key;
  bool any = false;
  for (const Value& each : iterate(run, of)) {
    const Value key = sort_key(run, each, by, case_sensitive);
    if (any && !(largest ? less(run, best_key, key) : less(run, key, best_key))) continue;
    best = each;
    best_key = key;
    any = true;
  }
  return best;
}
Value f_min(Run& run, const Value& of, Params& p) {
  return extreme(run, of, p, false);
}
Value f_max(Run& run, const Value& of, Params& p) {
  return extreme(run, of, p, true);
}

// A merge sort of our own: std::sort is undefined where the order is not strict, and NaN makes it so.
void stable_sort(Run& run, std::vector<std::pair<Value, Value>>& entries, bool reverse) {
  std::vector<std::pair<Value, Value>> other(entries.size());
  for (size_t width = 1; width < entries.size(); width *= 2) {
    for (size_t begin = 0; begin < entries.size(); begin += 2 * width) {
      const size_t middle = std::min(begin + width, entries.size()),
                   end = std::min(begin + 2 * width, entries.size());
      size_t a = begin, b = middle;
      for (size_t out = begin; out < end; ++out) {
        run.step();
        const bool second =
            b < end && (a == middle || (reverse ? less(run, entries[a].first, entries[b].first)
                                                : less(run, entries[b].first, entries[a].first)));
        other[out] = std::move(second ? entries[b++] : entries[a++]);
      }
    }
    entries.swap(other);
  }
}

Value f_sort(Run& run, const Value& of, Params& p) {
  const bool reverse = p.flag("reverse", false), case_sensitive = p.flag("case_sensitive", false);
  const Value* by = p.find("attribute");
  std::vector<std::pair<Value, Value>> entries;
  for (const Value& each : iterate(run, of))
    entries.emplace_back(sort_key(run, each, by && !by->none() ? by : nullptr, case_sensitive), each);
  stable_sort(run, entries, reverse);
  std::vector<Value> out;
  for (auto& entry : entries) out.push_back(std::move(entry.second));
  return list_value(run, std::move(out));
}

Value f_dictsort(Run& run, const Value& of, Params& p) {
  const bool case_sensitive = p.flag("case_sensitive", false);
  const std::string by = p.text("by", "key");
  const bool reverse = p.flag("reverse", false);
  if (by != "key" && by != "value") run.bad_data("dictsort: 'by' is to be key or value, not '{}'", by);
  const Value index(int64_t{by == "value"});
  std::vector<std::pair<Value, Value>> entries;
  for (const Value& each : pairs(run, of))
    entries.emplace_back(sort_key(run, each, &index, case_sensitive), each);
  stable_sort(run, entries, reverse);
  std::vector<Value> out;
  for (auto& entry : entries) out.push_back(std::move(entry.second));
  return list_value(run, std::move(out));
}

Value f_unique(Run& run, const Value& of, Params& p) {
  const bool case_sensitive = p.flag("case_sensitive", false);
  const Value* by = p.find("attribute");
  std::vector<Value> seen, out;
  for (const Value& each : iterate(run, of)) {
    const Value key = sort_key(run, each, by && !by->none() ? by : nullptr, case_sensitive);
    run.step(static_cast<int64_t>(seen.size()));
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& other) { return other.equals(key); }))
      continue;
    seen.push_back(key);
    out.push_back(each);
  }
  return lazy(run, std::move(out));
}

Value f_reverse(Run& run, const Value& of, Params&) {
  if (of.string()) {
    const auto letters = chars(of.text());
    std::string out;
    for (auto each = letters.rbegin(); each != letters.rend(); ++each) out += *each;
    return text_value(run, std::move(out));
  }
  std::vector<Value> items = iterate(run, of);
  std::reverse(items.begin(), items.end());
  return lazy(run, std::move(items));
}

Value f_indent(Run& run, const Value& of, Params& p) {
  const Value width = p.get("width", Value(int64_t{4}));
  const bool first = p.flag("first", false), blank = p.flag("blank", false);
  if (!width.string() && (!width.integer() || width.whole() > 1000))
    run.bad_data("indent: width is to be a text or an integer up to 1000");
  const std::string by = width.string()
                             ? width.text()
                             : std::string(static_cast<size_t>(std::max<int64_t>(0, width.whole())), ' ');
  const std::string text = str(of) + "\n";
  const auto lines = split_lines(text, false);
  run.charge(static_cast<int64_t>(text.size() + lines.size() * (by.size() + 1) + by.size()));
  std::string out = first ? by : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i > 0 && (blank || !lines[i].empty())) out += by;
    out += lines[i];
  }
  return Value(std::move(out));
}

using FilterFunction = Value (*)(Run&, const Value&, Params&);
constexpr std::pair<std::string_view, FilterFunction> kFilters[] = {
    {"abs", f_abs},         {"capitalize", f_capitalize},
    {"count", f_length},    {"d", f_default},
    {"default", f_default}, {"dictsort", f_dictsort},
    {"first", f_first},     {"float", f_float},
    {"indent", f_indent},   {"int", f_int},
    {"items", f_items},     {"join", f_join},
    {"last", f_last},       {"length", f_length},
    {"list", f_list},       {"lower", f_lower},
    {"max", f_max},         {"min", f_min},
    {"replace", f_replace}, {"reverse", f_reverse},
    {"round", f_round},     {"safe", f_safe},
    {"sort", f_sort},       {"string", f_string},
    {"sum", f_sum},         {"title", f_title},
    {"tojson", f_tojson},   {"trim", f_trim},
    {"unique", f_unique},   {"upper", f_upper},
};
// These call other filters and tests, so they take their arguments whole.
constexpr std::string_view kHigherFilters[] = {"map", "select", "reject", "selectattr", "rejectattr"};

Args rest_of(const Args& args, size_t from) {
  Args out;
  out.positional.assign(
      args.positional.begin() + static_cast<std::ptrdiff_t>(std::min(from, args.positional.size())),
      args.positional.end());
  out.named = args.named;
  return out;
}

std::string leading_name(Run& run, std::string_view what, const Args& args, size_t at) {
  if (at >= args.positional.size() || !args.positional[at].string())
    run.bad_template("{} wants a name as argument {}", what, at + 1);
  return args.positional[at].text();
}

Value map_filter(Run& run, const Value& of, const Args& args) {
  std::vector<Value> out;
  if (args.positional.empty()) {
    const Value by = [&] {
      for (const auto& [key, value] : args.named)
        if (key == "attribute") return value;
      run.bad_template("map wants the name of a filter, or attribute=");
    }();
    const Value* otherwise = nullptr;
    for (const auto& [key, value] : args.named) {
      if (key == "default")
        otherwise = &value;
      else if (key != "attribute")
        run.bad_template("map does not know the argument '{}'", key);
    }
    for (const Value& each : iterate(run, of)) {
      run.step();
      Value found = path(run, each, by);
      out.push_back(found.undefined() && otherwise ? *otherwise : found);
    }
  } else {
    const std::string name = leading_name(run, "map", args, 0);
    const Args rest = rest_of(args, 1);
    for (const Value& each : iterate(run, of)) out.push_back(filter(run, name, each, rest));
  }
  return lazy(run, std::move(out));
}

Value select_filter(Run& run, std::string_view name, const Value& of, const Args& args) {
  const bool keep = name.starts_with("select"), by_attribute = name.ends_with("attr");
  const size_t at = by_attribute ? 1 : 0;  // of the test's name
  if (by_attribute && args.positional.empty()) run.bad_template("{} wants an attribute", name);
  const bool has_name = args.positional.size() > at;
  const std::string test_name = has_name ? leading_name(run, name, args, at) : "";
  const Args rest = rest_of(args, at + 1);
  std::vector<Value> out;
  for (const Value& each : iterate(run, of)) {
    run.step();
    const Value what = by_attribute ? path(run, each, args.positional[0]) : each;
    if ((has_name ? test(run, test_name, what, rest) : what.truthy()) == keep) out.push_back(each);
  }
  return lazy(run, std::move(out));
}

// ---- tests

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

// ---- functions

Value range(Run& run, const Args& args) {
  constexpr int64_t kLongest = 100'000;  // Jinja's sandbox has the same
  Params p(run, "range", args);
  if (args.positional.empty()) run.bad_template("range wants an argument");
  int64_t begin = p.whole("start", 0), end = 0, step = 1;
  if (args.positional.size() == 1) {
    end = std::exchange(begin, 0);
  } else {
    end = p.whole("stop", 0);
    step = p.whole("step", 1);
  }
  p.done();
  if (step == 0) run.bad_data("range: the step is zero");
  std::vector<Value> out;
  for (int64_t i = begin; step > 0 ? i < end : i > end;) {
    if (static_cast<int64_t>(out.size()) == kLongest)
      run.bad_template("range: more than {} numbers", kLongest);
    out.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return list_value(run, std::move(out));
}

Value strftime_now(Run& run, const std::string& format) {
  if (format.size() > 256) run.bad_data("strftime_now: the format is longer than 256 bytes");
  if (format.empty()) return Value("");
  const std::time_t now = run.now() ? static_cast<std::time_t>(*run.now()) : std::time(nullptr);
  std::tm parts{};
  if (!::localtime_r(&now, &parts)) run.bad_data("strftime_now: the time {} has no date", now);
  std::string out(8192, '\0');
  out.resize(std::strftime(out.data(), out.size(), format.c_str(), &parts));
  if (unicode::find_bad_utf8(out) != std::string::npos) run.bad_data("strftime_now: the date is not UTF-8");
  return text_value(run, std::move(out));
}

// ---- methods

// The argument of startswith and endswith: a text or a tuple of texts.
bool any_affix(Run& run, const Value& affix, bool (*has)(const std::string&, const std::string&),
               const std::string& text) {
  if (affix.string()) return has(text, affix.text());
  if (!affix.list() || !affix.items().tuple)
    run.bad_data("startswith and endswith want a text, not {}", affix.type());
  for (const Value& each : affix.items().items) {
    if (!each.string()) run.bad_data("startswith and endswith want texts, not {}", each.type());
    if (has(text, each.text())) return true;
  }
  return false;
}

Value find_in_text(Run& run, const std::string& text, std::string_view name, Params& p) {
  const Value& what = p.need("sub");
  if (!what.string()) run.bad_data("{} wants a text, not {}", name, what.type());
  if (name == "count") {
    if (what.text().empty()) return count_chars(text) + 1;
    int64_t count = 0;
    for (size_t at = text.find(what.text()); at != std::string::npos;
         at = text.find(what.text(), at + what.text().size()))
      ++count;
    return count;
  }
  const size_t at = name.starts_with('r') ? text.rfind(what.text()) : text.find(what.text());
  if (at != std::string::npos) return count_chars(std::string_view(text).substr(0, at));
  if (name == "index" || name == "rindex") run.bad_data("the text has no {}", repr(what));
  return int64_t{-1};
}

Value text_method(Run& run, const std::string& text, std::string_view name, Params& p) {
  if (name == "strip" || name == "lstrip" || name == "rstrip") {
    const auto characters = p.text_or_none("chars");
    const Side side = name == "strip" ? Side::kBoth : name == "lstrip" ? Side::kLeft : Side::kRight;
    return text_value(run, std::string(strip(text, characters ? &*characters : nullptr, side)));
  }
  if (name == "startswith")
    return any_affix(
        run, p.need("prefix"), [](const std::string& a, const std::string& b) { return a.starts_with(b); },
        text);
  if (name == "endswith")
    return any_affix(
        run, p.need("suffix"), [](const std::string& a, const std::string& b) { return a.ends_with(b); },
        text);
  if (name == "split" || name == "rsplit") {
    const auto separator = p.text_or_none("sep");
    if (separator && separator->empty()) run.bad_data("split: the separator is empty");
    return texts(run,
                 split(text, separator ? &*separator : nullptr, p.whole("maxsplit", -1), name == "rsplit"));
  }
  if (name == "partition" || name == "rpartition") {
    const auto separator = p.text_or_none("sep");
    if (!separator || separator->empty()) run.bad_data("{}: the separator is empty", name);
    const size_t at = name == "partition" ? text.find(*separator) : text.rfind(*separator);
    std::vector<Value> parts;
    if (at != std::string::npos)
      parts = {Value(text.substr(0, at)), Value(*separator), Value(text.substr(at + separator->size()))};
    else
      parts = name == "partition" ? std::vector<Value>{Value(text), Value(""), Value("")}
                                  : std::vector<Value>{Value(""), Value(""), Value(text)};
    run.charge(static_cast<int64_t>(text.size()));
    return list_value(run, std::move(parts), true);
  }
  if (name == "splitlines") return texts(run, split_lines(text, p.flag("keepends", false)));
  if (name == "upper") return text_value(run, upper(text));
  if (name == "lower") return text_value(run, lower(text));
  if (name == "title") return text_value(run, title(text));
  if (name == "capitalize") return text_value(run, capitalize(text));
  if (name == "replace") {
    const auto what = p.text_or_none("old"), by = p.text_or_none("new");
    if (!what || !by) run.bad_data("replace wants two texts");
    return replaced(run, text, *what, *by, p.whole("count", -1));
  }
  if (name == "removeprefix" || name == "removesuffix") {
    const auto affix = p.text_or_none("affix");
    if (!affix) run.bad_data("{} wants a text", name);
    std::string out = text;
    if (name == "removeprefix" && out.starts_with(*affix))
      out.erase(0, affix->size());
    else if (name == "removesuffix" && out.ends_with(*affix))
      out.resize(out.size() - affix->size());
    return text_value(run, std::move(out));
  }
  if (name == "join") {
    const Value& items = p.need("iterable");
    std::string out;
    bool first = true;
    for (const Value& each : iterate(run, items)) {
      if (!each.string()) run.bad_data("join wants texts, not {}", each.type());
      run.charge(static_cast<int64_t>(text.size() + each.text().size()));
      if (!first) out += text;
      first = false;
      out += each.text();
    }
    return Value(std::move(out));
  }
  if (name == "find" || name == "rfind" || name == "index" || name == "rindex" || name == "count")
    return find_in_text(run, text, name, p);
  if (name == "isdigit" || name == "isnumeric" || name == "isdecimal")
    return all_have(text, unicode::kNumber);
  if (name == "isalpha") return all_have(text, unicode::kLetter);
  if (name == "isalnum") return all_have(text, unicode::kLetter | unicode::kNumber);
  if (name == "isspace") return !text.empty() && strip(text, nullptr, Side::kBoth).empty();
  if (name == "isupper") return is_upper(text);
  if (name == "islower") return is_lower(text);
  run.bad_template("the method '{}' of a text is not supported", name);
}

}  // namespace

bool has_filter(std::string_view name) {
  return std::any_of(std::begin(kFilters), std::end(kFilters),
                     [&](const auto& entry) { return entry.first == name; }) ||
         std::find(std::begin(kHigherFilters), std::end(kHigherFilters), name) != std::end(kHigherFilters);
}
bool has_test(std::string_view name) {
  return find_test(name) != nullptr;
}
bool has_function(std::string_view name) {
  return name == "range" || name == "dict" || name == "namespace" || name == "raise_exception" ||
         name == "strftime_now";
}

Value filter(Run& run, std::string_view name, const Value& of, const Args& args) {
  run.step();
  for (const auto& [known, apply] : kFilters) {
    if (known != name) continue;
    Params p(run, name, args);
    if (of.string()) run.step(static_cast<int64_t>(of.text().size() / 64));
    Value out = apply(run, of, p);
    p.done();
    return out;
  }
  if (name == "map") return map_filter(run, of, args);
  if (has_filter(name)) return select_filter(run, name, of, args);
  run.bad_template("the filter '{}' is not supported", name);
}

bool test(Run& run, std::string_view name, const Value& of, const Args& args) {
  run.step();
  const TestEntry* entry = find_test(name);
  if (!entry) run.bad_template("the test '{}' is not supported", name);
  if (args.positional.size() != (entry->argument ? 1u : 0u) || !args.named.empty())
    run.bad_template("the test '{}' wants {}", name, entry->argument ? "one argument" : "no argument");
  return entry->function(run, of, entry->argument ? &args.positional[0] : nullptr);
}

Value function(Run& run, std::string_view name, const Args& args) {
  run.step();
  if (name == "range") return range(run, args);
  Params p(run, name, args);
  if (name == "raise_exception") {
    const std::string message = str(p.need("message"));
    p.done();
    run.bad_data("{}", message);
  }
  if (name == "strftime_now") {
    const std::string format = str(p.need("format"));
    p.done();
    return strftime_now(run, format);
  }
  if (name != "dict") run.bad_template("the function '{}' is not supported", name);
  Dict out;
  if (!args.positional.empty()) {
    if (args.positional.size() > 1 || !args.positional[0].dict())
      run.bad_template("dict wants named arguments or one mapping");
    out = args.positional[0].fields();
  }
  for (const auto& [key, value] : args.named) {
    const auto found = std::find_if(out.items.begin(), out.items.end(),
                                    [&](const auto& entry) { return entry.first == key; });
    if (found != out.items.end())
      found->second = value;
    else
      out.items.emplace_back(key, value);
  }
  run.charge(static_cast<int64_t>(out.items.size() * sizeof(out.items[0])));
  return Value(std::move(out));
}

Value method(Run& run, const Value& of, std::string_view name, const Args& args) {
  run.step();
  Params p(run, name, args);
  if (of.string()) {
    run.step(static_cast<int64_t>(of.text().size() / 64));
    Value out = text_method(run, of.text(), name, p);
    p.done();
    return out;
  }
  if (of.dict()) {
    if (name == "items") return list_value(run, pairs(run, of));
    if (name == "keys") return list_value(run, iterate(run, of));
    if (name == "values") {
      std::vector<Value> out;
      for (const auto& entry : of.fields().items) out.push_back(entry.second);
      return list_value(run, std::move(out));
    }
    if (name == "copy") return of;
    if (name == "get") {
      const Value& key = p.need("key");
      const Value otherwise = p.get("default", None{});
      p.done();
      const Value* found = key.string() ? of.fields().find(key.text()) : nullptr;
      return found ? *found : otherwise;
    }
  }
  if (of.list() && (name == "index" || name == "count")) {
    const Value& wanted = p.need("value");
    p.done();
    run.step(of.extent().size / 16);
    const auto& items = of.items().items;
    if (name == "count")
      return static_cast<int64_t>(
          std::count_if(items.begin(), items.end(), [&](const Value& each) { return each.equals(wanted); }));
    for (size_t i = 0; i < items.size(); ++i)
      if (items[i].equals(wanted)) return static_cast<int64_t>(i);
    run.bad_data("the list has no {}", repr(wanted));
  }
  if (const auto loop = of.object<Loop>(); loop && name == "cycle") {
    if (args.positional.empty()) run.bad_template("loop.cycle wants arguments");
    return args.positional[loop->index % args.positional.size()];
  }
  run.bad_template("the method '{}' of a value of type {} is not supported", name, of.type());
}

}  // namespace titanium::jinja
