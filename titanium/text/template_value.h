// Values of a chat template: Python's None, bool, int, float, str, list, tuple, dict, and a few objects.
// Immutable except for namespaces.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "titanium/text/chat_template.h"

namespace titanium::jinja {

class Value;

struct Undefined {
  bool operator==(const Undefined&) const { return true; }
};
struct None {
  bool operator==(const None&) const { return true; }
};

struct List {
  std::vector<Value> items;
  bool tuple = false;
  bool lazy = false;  // what Jinja gives as a generator: always true, without length or items
};
struct Dict {
  std::vector<std::pair<std::string, Value>> items;
  const Value* find(std::string_view key) const;
};
// How deep a value is nested, and how large it would be written out.  Walking and freeing a value can then
// not use up the stack, and a small value of shared parts not the memory.
struct Extent {
  int depth = 0;
  int64_t size = 1;
};
// Things that are compared by identity.
struct Object {
  virtual ~Object() = default;
  virtual const char* type() const = 0;
  Extent extent{1, 1};
};

class Value {
 public:
  using Text = std::shared_ptr<const std::string>;
  using ListRef = std::shared_ptr<const List>;
  using DictRef = std::shared_ptr<const Dict>;
  using ObjectRef = std::shared_ptr<Object>;

  Value() = default;  // undefined
  Value(None) : data_(None{}) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::string text) : extent_{0, static_cast<int64_t>(text.size()) + 1} {
    data_ = std::make_shared<const std::string>(std::move(text));
  }
  Value(const char* text) : Value(std::string(text)) {}
  Value(List list);  // BadData beyond kMaxDepth or kMaxSize
  Value(Dict dict);
  Value(ObjectRef object) : data_(object), extent_(object->extent) {}

  static constexpr int kMaxDepth = 200;
  static constexpr int64_t kMaxSize = 1 << 27;
  Extent extent() const { return extent_; }
  // Of something that holds these.
  static void grow(Extent& extent, const Value& inner);

  bool undefined() const { return is<Undefined>(); }
  bool none() const { return is<None>(); }
  bool string() const { return is<Text>(); }
  bool integer() const { return is<int64_t>() || is<bool>(); }  // as in Python, a bool is one
  bool number() const { return integer() || is<double>(); }
  bool list() const { return is<ListRef>(); }  // or tuple
  bool dict() const { return is<DictRef>(); }
  template <typename T>
  bool is() const {
    return std::holds_alternative<T>(data_);
  }

  const std::string& text() const { return *std::get<Text>(data_); }
  const List& items() const { return *std::get<ListRef>(data_); }
  const Dict& fields() const { return *std::get<DictRef>(data_); }
  bool boolean() const { return std::get<bool>(data_); }
  int64_t whole() const { return is<bool>() ? boolean() : std::get<int64_t>(data_); }
  double real() const { return is<double>() ? std::get<double>(data_) : static_cast<double>(whole()); }
  template <typename T>
  std::shared_ptr<T> object() const {  // null if it is not a T
    const auto* ref = std::get_if<ObjectRef>(&data_);
    return ref ? std::dynamic_pointer_cast<T>(*ref) : nullptr;
  }

  bool truthy() const;
  bool equals(const Value& other) const;  // Python's ==
  const char* type() const;               // Python's name of the type

 private:
  std::variant<Undefined, None, bool, int64_t, double, Text, ListRef, DictRef, ObjectRef> data_;
  Extent extent_;
};

// BadData if it is nested deeper than kMaxDepth or holds an integer that does not fit 64 bits.
Value from_json(const ChatJson& json, int depth = 0);

std::string str(const Value& value);   // Python's str()
std::string repr(const Value& value);  // Python's repr()
std::string repr_float(double value);  // shortest that reads back, laid out as Python does

struct JsonStyle {
  bool ascii = false, sort_keys = false;
  int indent = -1;  // negative: on one line
  std::string item_separator = ", ", key_separator = ": ";
};
// Python's json.dumps; BadData for values that have no JSON form.
std::string to_json(const Value& value, const JsonStyle& style);

// Strings are sequences of code points.
int64_t count_chars(std::string_view text);
std::vector<std::string_view> chars(std::string_view text);
bool is_python_space(uint32_t code);

}  // namespace titanium::jinja
