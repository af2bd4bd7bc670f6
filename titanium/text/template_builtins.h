// Filters, tests, methods and functions of chat templates, by Jinja's and Python's rules.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/text/template_value.h"

namespace titanium::jinja {

// One rendering: where it stands, for messages, and what it may still use up.
class Run {
 public:
  Run(std::string name, std::optional<int64_t> now) : name_(std::move(name)), now_(now) {}

  int line = 0;
  std::optional<int64_t> now() const { return now_; }

  // What the data is to blame for, and what the template is.
  template <typename... Args>
  [[noreturn]] void bad_data(fmt::format_string<Args...> format, Args&&... args) const {
    throw BadData("{}:{}: {}", name_, line, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  [[noreturn]] void bad_template(fmt::format_string<Args...> format, Args&&... args) const {
    throw BadConfig("{}:{}: {}", name_, line, fmt::format(format, std::forward<Args>(args)...));
  }

  void step(int64_t steps = 1) {
    if ((steps_ += steps) > kMaxSteps) bad_template("the template takes more than {} steps", kMaxSteps);
  }
  // Before bytes of text or values are made.
  void charge(int64_t bytes) {
    if ((bytes_ += bytes) > kMaxBytes)
      bad_template("the template makes more than {} bytes of values", kMaxBytes);
  }
  void check_output(size_t bytes) const {
    if (bytes > kMaxOutput) bad_template("the output is longer than {} bytes", kMaxOutput);
  }

 private:
  static constexpr int64_t kMaxSteps = 10'000'000;
  static constexpr int64_t kMaxBytes = int64_t{1} << 29;
  static constexpr size_t kMaxOutput = size_t{1} << 26;

  std::string name_;
  std::optional<int64_t> now_;
  int64_t steps_ = 0, bytes_ = 0;
};

struct Args {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

struct Namespace final : Object {
  std::map<std::string, Value, std::less<>> fields;
  const char* type() const override { return "namespace"; }
};

// The variable `loop` of a for block.
struct Loop final : Object {
  std::vector<Value> items;
  size_t index = 0;  // from 0
  const char* type() const override { return "loop"; }
};

// A method that was named but not called.
struct Method final : Object {
  const char* type() const override { return "method"; }
};

bool has_filter(std::string_view name);
bool has_test(std::string_view name);
bool has_function(std::string_view name);

Value filter(Run& run, std::string_view name, const Value& of, const Args& args);
bool test(Run& run, std::string_view name, const Value& of, const Args& args);
Value function(Run& run, std::string_view name,
               const Args& args);  // not namespace(), which the renderer makes
Value method(Run& run, const Value& of, std::string_view name, const Args& args);

// value.name and value[key]; undefined where there is none.
Value attribute(Run& run, const Value& of, std::string_view name);
Value item(Run& run, const Value& of, const Value& key);
Value slice(Run& run, const Value& of, const Value& begin, const Value& end, const Value& step);

std::vector<Value> iterate(Run& run, const Value& of);  // what a for block goes through
bool contains(Run& run, const Value& holder, const Value& wanted);
bool less(Run& run, const Value& a, const Value& b);
Value arithmetic(Run& run, std::string_view op, const Value& a, const Value& b);
Value text_value(Run& run, std::string text);  // charged
Value list_value(Run& run, std::vector<Value> items, bool tuple = false);

}  // namespace titanium::jinja
