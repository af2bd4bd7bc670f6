// Methods of values, and functions.
#include <algorithm>
#include <ctime>

#include "titanium/text/template_params.h"
#include "titanium/text/template_text.h"
#include "titanium/text/unicode.h"

namespace titanium::jinja {
namespace {

Value texts(Run& run, const std::vector<std::string_view>& parts) {
  std::vector<Value> out;
  for (const std::string_view part : parts) {
    run.charge(static_cast<int64_t>(part.size()) + 64);
    out.emplace_back(std::string(part));
  }
  return list_value(run, std::move(out));
}

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

bool has_function(std::string_view name) {
  return name == "range" || name == "dict" || name == "namespace" || name == "raise_exception" ||
         name == "strftime_now";
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
                                    [&, &key = key](const auto& entry) { return entry.first == key; });
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
