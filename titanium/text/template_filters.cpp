#include <algorithm>
#include <charconv>
#include <cmath>

#include "titanium/text/template_params.h"
#include "titanium/text/template_text.h"
#include "titanium/text/unicode.h"

namespace titanium::jinja {

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

namespace {

Value lazy(Run& run, std::vector<Value> items) {
  run.charge(static_cast<int64_t>(items.size() * sizeof(Value)) + 64);
  return Value(List{std::move(items), false, true});
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
  out.reserve(entries.size());
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
  out.reserve(entries.size());
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

}  // namespace

bool has_filter(std::string_view name) {
  return std::any_of(std::begin(kFilters), std::end(kFilters),
                     [&](const auto& entry) { return entry.first == name; }) ||
         std::find(std::begin(kHigherFilters), std::end(kHigherFilters), name) != std::end(kHigherFilters);
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

}  // namespace titanium::jinja
