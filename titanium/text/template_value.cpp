#include "titanium/text/template_value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "titanium/base/error.h"
#include "titanium/text/unicode.h"

namespace titanium::jinja {

const Value* Dict::find(std::string_view key) const {
  for (const auto& [name, value] : items)
    if (name == key) return &value;
  return nullptr;
}

void Value::grow(Extent& extent, const Value& inner) {
  extent.depth = std::max(extent.depth, inner.extent_.depth + 1);
  extent.size += inner.extent_.size;
  if (extent.depth > kMaxDepth) throw BadData("values are nested deeper than {}", kMaxDepth);
  if (extent.size > kMaxSize) throw BadData("a value is larger than {} bytes", kMaxSize);
}

Value::Value(List list) : extent_{1, 1} {
  for (const Value& item : list.items) grow(extent_, item);
  data_ = std::make_shared<const List>(std::move(list));
}

Value::Value(Dict dict) : extent_{1, 1} {
  for (const auto& [key, item] : dict.items) {
    extent_.size += static_cast<int64_t>(key.size());
    grow(extent_, item);
  }
  data_ = std::make_shared<const Dict>(std::move(dict));
}

bool Value::truthy() const {
  if (undefined() || none()) return false;
  if (is<bool>()) return boolean();
  if (is<int64_t>()) return whole() != 0;
  if (is<double>()) return real() != 0;
  if (string()) return !text().empty();
  if (list()) return items().lazy || !items().items.empty();
  if (dict()) return !fields().items.empty();
  return true;
}

bool Value::equals(const Value& other) const {
  if (number() && other.number())
    return integer() && other.integer() ? whole() == other.whole() : real() == other.real();
  if (data_.index() != other.data_.index()) return false;
  if (string()) return text() == other.text();
  if (list()) {
    const List &a = items(), &b = other.items();
    return a.tuple == b.tuple && std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(),
                                            [](const Value& x, const Value& y) { return x.equals(y); });
  }
  if (dict()) {
    const Dict &a = fields(), &b = other.fields();
    if (a.items.size() != b.items.size()) return false;
    return std::all_of(a.items.begin(), a.items.end(), [&](const auto& entry) {
      const Value* value = b.find(entry.first);
      return value && entry.second.equals(*value);
    });
  }
  return data_ == other.data_;  // undefined, None, the same object
}

const char* Value::type() const {
  if (undefined()) return "undefined";
  if (none()) return "None";
  if (is<bool>()) return "bool";
  if (is<int64_t>()) return "int";
  if (is<double>()) return "float";
  if (string()) return "str";
  if (list()) return items().tuple ? "tuple" : "list";
  if (dict()) return "dict";
  return std::get<ObjectRef>(data_)->type();
}

Value from_json(const ChatJson& json, int depth) {
  if (depth > Value::kMaxDepth) throw BadData("the chat is nested deeper than {}", Value::kMaxDepth);
  switch (json.type()) {
    case ChatJson::value_t::boolean:
      return json.get<bool>();
    case ChatJson::value_t::number_integer:
      return json.get<int64_t>();
    case ChatJson::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX))
        throw BadData("the integer {} in the chat does not fit 64 bits", json.get<uint64_t>());
      return json.get<int64_t>();
    case ChatJson::value_t::number_float:
      return json.get<double>();
    case ChatJson::value_t::string: {
      const auto& text = json.get_ref<const std::string&>();
      if (unicode::find_bad_utf8(text) != std::string_view::npos)
        throw BadData("a text in the chat is not UTF-8");
      return text;
    }
    case ChatJson::value_t::array: {
      List list;
      list.items.reserve(json.size());
      for (const ChatJson& item : json) list.items.push_back(from_json(item, depth + 1));
      return list;
    }
    case ChatJson::value_t::object: {
      Dict dict;
      dict.items.reserve(json.size());
      for (const auto& [key, item] : json.items()) {
        if (unicode::find_bad_utf8(key) != std::string_view::npos)
          throw BadData("a key in the chat is not UTF-8");
        dict.items.emplace_back(key, from_json(item, depth + 1));
      }
      return dict;
    }
    default:
      return None{};
  }
}

std::string repr_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 64> buffer;
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific);
  std::string_view text(buffer.data(), static_cast<size_t>(end.ptr - buffer.data()));
  std::string sign;
  if (text.front() == '-') {
    sign = "-";
    text.remove_prefix(1);
  }
  const size_t e = text.find('e');
  std::string digits(text.substr(0, e));
  std::erase(digits, '.');
  const std::string_view power = text.substr(e + 1);
  int exponent = 0;
  std::from_chars(power.data() + (power.front() == '+'), power.data() + power.size(), exponent);
  const int count = static_cast<int>(digits.size());
  if (exponent < -4 || exponent >= 16) {
    std::string out = sign + digits.substr(0, 1);
    if (count > 1) out += "." + digits.substr(1);
    const int size = std::abs(exponent);
    return out + (exponent < 0 ? "e-" : "e+") + (size < 10 ? "0" : "") + std::to_string(size);
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  if (count <= exponent + 1)
    return sign + digits + std::string(static_cast<size_t>(exponent + 1 - count), '0') + ".0";
  const size_t whole = static_cast<size_t>(exponent) + 1;  // digits before the point
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

namespace {

std::string repr_text(const std::string& text) {
  const bool has_single = text.find('\'') != std::string::npos,
             has_double = text.find('"') != std::string::npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0; i < text.size();) {
    const auto [code, size] = unicode::at(text, i);
    if (code == '\n') {
      out += "\\n";
    } else if (code == '\r') {
      out += "\\r";
    } else if (code == '\t') {
      out += "\\t";
    } else if (code == '\\' || code == static_cast<uint32_t>(quote)) {
      out += '\\';
      out += static_cast<char>(code);
    } else if (!(unicode::properties_of(code) & unicode::kUnprintable)) {
      out.append(text, i, size);
    } else {
      out += code < 0x100     ? fmt::format("\\x{:02x}", code)
             : code < 0x10000 ? fmt::format("\\u{:04x}", code)
                              : fmt::format("\\U{:08x}", code);
    }
    i += size;
  }
  return out + quote;
}

}  // namespace

std::string repr(const Value& value) {
  if (value.undefined()) return "Undefined";
  if (value.none()) return "None";
  if (value.is<bool>()) return value.boolean() ? "True" : "False";
  if (value.is<int64_t>()) return std::to_string(value.whole());
  if (value.is<double>()) return repr_float(value.real());
  if (value.string()) return repr_text(value.text());
  if (value.list()) {
    const List& list = value.items();
    std::string out(1, list.tuple ? '(' : '[');
    for (size_t i = 0; i < list.items.size(); ++i) out += (i > 0 ? ", " : "") + repr(list.items[i]);
    if (list.tuple && list.items.size() == 1) out += ',';
    return out + (list.tuple ? ')' : ']');
  }
  if (value.dict()) {
    std::string out = "{";
    for (const auto& [key, item] : value.fields().items) {
      if (out.size() > 1) out += ", ";
      out += repr_text(key) + ": " + repr(item);
    }
    return out + "}";
  }
  throw BadData("a {} cannot be shown as text", value.type());
}

std::string str(const Value& value) {
  if (value.undefined()) return "";
  return value.string() ? value.text() : repr(value);
}

namespace {

std::string json_text(std::string_view text, bool ascii) {
  std::string out = "\"";
  for (size_t i = 0; i < text.size();) {
    const auto [code, size] = unicode::at(text, i);
    switch (code) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (code >= 0x10000 && ascii)
          out += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + ((code - 0x10000) >> 10),
                             0xdc00 + ((code - 0x10000) & 0x3ff));
        else if (code < 0x20 || (ascii && code > 0x7e))
          out += fmt::format("\\u{:04x}", code);
        else
          out.append(text, i, size);
    }
    i += size;
  }
  return out + "\"";
}

void write_json(const Value& value, const JsonStyle& style, int level, std::string& out) {
  auto line = [&](int at) {
    if (style.indent >= 0)
      out += "\n" + std::string(static_cast<size_t>(at) * static_cast<size_t>(style.indent), ' ');
  };
  if (value.none()) {
    out += "null";
  } else if (value.is<bool>()) {
    out += value.boolean() ? "true" : "false";
  } else if (value.is<double>()) {
    out += std::isnan(value.real())   ? "NaN"
           : std::isinf(value.real()) ? (value.real() < 0 ? "-Infinity" : "Infinity")
                                      : repr_float(value.real());
  } else if (value.integer()) {
    out += std::to_string(value.whole());
  } else if (value.string()) {
    out += json_text(value.text(), style.ascii);
  } else if (value.list()) {
    if (value.items().items.empty()) {
      out += "[]";
      return;
    }
    out += '[';
    bool first = true;
    for (const Value& item : value.items().items) {
      if (!first) out += style.item_separator;
      first = false;
      line(level + 1);
      write_json(item, style, level + 1, out);
    }
    line(level);
    out += ']';
  } else if (value.dict()) {
    std::vector<const std::pair<std::string, Value>*> entries;
    for (const auto& entry : value.fields().items) entries.push_back(&entry);
    if (entries.empty()) {
      out += "{}";
      return;
    }
    if (style.sort_keys)
      std::sort(entries.begin(), entries.end(),
                [](const auto* a, const auto* b) { return a->first < b->first; });
    out += '{';
    bool first = true;
    for (const auto* entry : entries) {
      if (!first) out += style.item_separator;
      first = false;
      line(level + 1);
      out += json_text(entry->first, style.ascii) + style.key_separator;
      write_json(entry->second, style, level + 1, out);
    }
    line(level);
    out += '}';
  } else {
    throw BadData("tojson: a value of type {} has no JSON form", value.type());
  }
}

}  // namespace

std::string to_json(const Value& value, const JsonStyle& style) {
  std::string out;
  write_json(value, style, 0, out);
  return out;
}

int64_t count_chars(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char c) { return unicode::starts_char(c); });
}

std::vector<std::string_view> chars(std::string_view text) {
  std::vector<std::string_view> out;
  for (size_t i = 0; i < text.size();) {
    const uint32_t size = unicode::at(text, i).size;
    out.push_back(text.substr(i, size));
    i += size;
  }
  return out;
}

bool is_python_space(uint32_t c) {
  return (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

}  // namespace titanium::jinja
