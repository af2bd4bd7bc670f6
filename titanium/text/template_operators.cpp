// What operators, subscripts and loops do with values.
#include <algorithm>
#include <cmath>

#include "titanium/text/template_builtins.h"
#include "titanium/text/unicode.h"

namespace titanium::jinja {

Value text_value(Run& run, std::string text) {
  run.charge(static_cast<int64_t>(text.size()) + 64);
  return Value(std::move(text));
}

Value list_value(Run& run, std::vector<Value> items, bool tuple) {
  run.charge(static_cast<int64_t>(items.size() * sizeof(Value)) + 64);
  return Value(List{std::move(items), tuple, false});
}

Value item(Run& run, const Value& of, const Value& key) {
  if (of.undefined()) run.bad_data("an undefined value has no item {}", repr(key));
  if (of.list() && of.items().lazy) return {};
  if (of.list() && key.integer()) {
    const auto& items = of.items().items;
    const auto size = static_cast<int64_t>(items.size());
    const int64_t index = key.whole() < 0 ? key.whole() + size : key.whole();
    return index >= 0 && index < size ? items[static_cast<size_t>(index)] : Value();
  }
  if (of.string() && key.integer()) {
    run.step(static_cast<int64_t>(of.text().size() / 64));
    const auto all = chars(of.text());
    const auto size = static_cast<int64_t>(all.size());
    const int64_t index = key.whole() < 0 ? key.whole() + size : key.whole();
    return index >= 0 && index < size ? Value(std::string(all[static_cast<size_t>(index)])) : Value();
  }
  if (!key.string()) return {};
  if (of.dict()) {
    const Value* found = of.fields().find(key.text());
    if (found) return *found;
  }
  return attribute(run, of, key.text());
}

namespace {

Value loop_attribute(const Loop& loop, std::string_view name) {
  const auto index = static_cast<int64_t>(loop.index), size = static_cast<int64_t>(loop.items.size());
  if (name == "index") return index + 1;
  if (name == "index0") return index;
  if (name == "revindex") return size - index;
  if (name == "revindex0") return size - index - 1;
  if (name == "first") return index == 0;
  if (name == "last") return index + 1 == size;
  if (name == "length") return size;
  if (name == "depth") return int64_t{1};  // counts recursive loops only
  if (name == "depth0") return int64_t{0};
  if (name == "previtem") return index > 0 ? loop.items[loop.index - 1] : Value();
  if (name == "nextitem") return index + 1 < size ? loop.items[loop.index + 1] : Value();
  return {};
}

bool is_method_name(const Value& of, std::string_view name) {
  if (!of.dict()) return false;
  // Python looks for attributes before keys, so that {{ x.items }} is the method even if there is such a key.
  for (const std::string_view each : {"items", "keys", "values", "get", "pop", "popitem", "update", "copy",
                                      "clear", "setdefault", "fromkeys"})
    if (name == each) return true;
  return false;
}

}  // namespace

Value attribute(Run& run, const Value& of, std::string_view name) {
  if (of.undefined()) run.bad_data("an undefined value has no attribute '{}'", name);
  if (is_method_name(of, name)) return Value(Value::ObjectRef(std::make_shared<Method>()));
  if (of.dict()) {
    const Value* found = of.fields().find(name);
    return found ? *found : Value();
  }
  if (const auto space = of.object<Namespace>()) {
    const auto found = space->fields.find(name);
    return found == space->fields.end() ? Value() : found->second;
  }
  if (const auto loop = of.object<Loop>()) return loop_attribute(*loop, name);
  return {};
}

Value slice(Run& run, const Value& of, const Value& begin, const Value& end, const Value& step) {
  if (of.undefined()) run.bad_data("an undefined value cannot be sliced");
  if (!of.list() && !of.string()) return {};
  auto whole = [&](const Value& value, int64_t otherwise) {
    if (value.none()) return otherwise;
    if (!value.integer()) run.bad_data("a slice wants integers, not {}", value.type());
    return value.whole();
  };
  const std::vector<std::string_view> letters =
      of.string() ? chars(of.text()) : std::vector<std::string_view>();
  const auto size = static_cast<int64_t>(of.string() ? letters.size() : of.items().items.size());
  run.step(size / 16);
  const int64_t by = whole(step, 1);
  if (by == 0) run.bad_data("a slice step is zero");
  // As Python's slice.indices.
  const int64_t lowest = by < 0 ? -1 : 0, highest = by < 0 ? size - 1 : size;
  auto clamp = [&](int64_t at) {
    return std::clamp(at < 0 ? (at < -size ? lowest : at + size) : at, lowest, highest);
  };
  const int64_t from = begin.none() ? (by < 0 ? highest : lowest) : clamp(whole(begin, 0));
  const int64_t to = end.none() ? (by < 0 ? lowest : highest) : clamp(whole(end, 0));
  std::string text;
  std::vector<Value> items;
  for (int64_t i = from; by > 0 ? i < to : i > to;) {
    if (of.string())
      text += letters[static_cast<size_t>(i)];
    else
      items.push_back(of.items().items[static_cast<size_t>(i)]);
    if (by > 0 ? by >= to - i : by <= to - i) break;  // the next is at or past the end; no overflow
    i += by;
  }
  return of.string() ? text_value(run, std::move(text)) : list_value(run, std::move(items), of.items().tuple);
}

std::vector<Value> iterate(Run& run, const Value& of) {
  std::vector<Value> out;
  if (of.undefined()) return out;
  if (of.list()) {
    out = of.items().items;
  } else if (of.dict()) {
    for (const auto& [key, value] : of.fields().items) out.emplace_back(key);
  } else if (of.string()) {
    run.charge(static_cast<int64_t>(of.text().size() * (sizeof(Value) + 48)));
    for (const std::string_view each : chars(of.text())) out.emplace_back(std::string(each));
  } else {
    run.bad_data("a value of type {} cannot be iterated", of.type());
  }
  run.charge(static_cast<int64_t>(out.size() * sizeof(Value)));
  return out;
}

bool contains(Run& run, const Value& holder, const Value& wanted) {
  if (holder.string()) {
    if (!wanted.string()) run.bad_data("'in' a text wants a text, not {}", wanted.type());
    run.step(static_cast<int64_t>(holder.text().size() / 64));
    return holder.text().find(wanted.text()) != std::string::npos;
  }
  if (holder.dict()) return wanted.string() && holder.fields().find(wanted.text());
  if (holder.undefined()) return false;
  if (!holder.list()) run.bad_data("'in' is not defined for {}", holder.type());
  run.step(holder.extent().size / 16);
  const auto& items = holder.items().items;
  return std::any_of(items.begin(), items.end(), [&](const Value& each) { return each.equals(wanted); });
}

bool less(Run& run, const Value& a, const Value& b) {
  if (a.number() && b.number())
    return a.integer() && b.integer() ? a.whole() < b.whole() : a.real() < b.real();
  if (a.string() && b.string()) return a.text() < b.text();  // UTF-8 sorts as code points do
  if (a.list() && b.list() && a.items().tuple == b.items().tuple) {
    const auto &x = a.items().items, &y = b.items().items;
    run.step(std::min(a.extent().size, b.extent().size) / 16);
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
      if (!x[i].equals(y[i])) return less(run, x[i], y[i]);
    return x.size() < y.size();
  }
  run.bad_data("{} and {} cannot be ordered", a.type(), b.type());
}

namespace {

int64_t checked(Run& run, std::string_view op, int64_t a, int64_t b) {
  int64_t out = 0;
  const bool overflow = op == "+"   ? __builtin_add_overflow(a, b, &out)
                        : op == "-" ? __builtin_sub_overflow(a, b, &out)
                                    : __builtin_mul_overflow(a, b, &out);
  if (overflow) run.bad_data("{} {} {} does not fit 64 bits", a, op, b);
  return out;
}

Value power(Run& run, const Value& a, const Value& b) {
  if (!a.integer() || !b.integer() || b.whole() < 0) return std::pow(a.real(), b.real());
  int64_t out = 1, base = a.whole();
  for (int64_t left = b.whole(); left > 0; left >>= 1) {
    if (left & 1) out = checked(run, "*", out, base);
    if (left > 1) base = checked(run, "*", base, base);
  }
  return out;
}

Value numbers(Run& run, std::string_view op, const Value& a, const Value& b) {
  if (op == "**") return power(run, a, b);
  const bool whole = a.integer() && b.integer();
  if (op == "+" || op == "-" || op == "*") {
    if (whole) return checked(run, op, a.whole(), b.whole());
    return op == "+" ? a.real() + b.real() : op == "-" ? a.real() - b.real() : a.real() * b.real();
  }
  if (b.real() == 0) run.bad_data("division by zero");
  if (op == "/") return a.real() / b.real();
  if (whole) {
    if (b.whole() == -1) return op == "%" ? Value(int64_t{0}) : Value(checked(run, "-", 0, a.whole()));
    const int64_t quotient = a.whole() / b.whole(), rest = a.whole() % b.whole();
    const bool down = rest != 0 && (rest < 0) != (b.whole() < 0);  // Python rounds down
    return op == "//" ? quotient - down : rest + (down ? b.whole() : 0);
  }
  const double quotient = std::floor(a.real() / b.real());
  if (op == "//") return quotient;
  const double rest = std::fmod(a.real(), b.real());
  return rest != 0 && (rest < 0) != (b.real() < 0) ? rest + b.real() : rest;
}

}  // namespace

Value arithmetic(Run& run, std::string_view op, const Value& a, const Value& b) {
  if (a.number() && b.number()) return numbers(run, op, a, b);
  if (op == "+" && a.string() && b.string()) {
    run.charge(static_cast<int64_t>(a.text().size() + b.text().size()));
    return Value(a.text() + b.text());
  }
  if (op == "+" && a.list() && b.list() && a.items().tuple == b.items().tuple) {
    std::vector<Value> out = a.items().items;
    out.insert(out.end(), b.items().items.begin(), b.items().items.end());
    return list_value(run, std::move(out), a.items().tuple);
  }
  if (op == "*" && (a.integer() || b.integer())) {
    const Value& of = a.integer() ? b : a;
    const int64_t times = std::max<int64_t>(0, (a.integer() ? a : b).whole());
    if (of.string() || of.list()) {
      const int64_t each = of.extent().size + static_cast<int64_t>(sizeof(Value));
      if (times > (int64_t{1} << 40) / each) run.bad_template("a repetition of {} times is too large", times);
      run.charge(each * times);
      if (of.string()) {
        std::string out;
        for (int64_t i = 0; i < times; ++i) out += of.text();
        return Value(std::move(out));
      }
      std::vector<Value> out;
      for (int64_t i = 0; i < times; ++i)
        out.insert(out.end(), of.items().items.begin(), of.items().items.end());
      return Value(List{std::move(out), of.items().tuple, false});
    }
  }
  if (op == "%" && a.string()) run.bad_template("formatting with % is not supported");
  run.bad_data("{} {} {} is not defined", a.type(), op, b.type());
}

}  // namespace titanium::jinja
