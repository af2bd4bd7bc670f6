// What filters, tests, methods and functions share.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/text/template_builtins.h"

namespace titanium::jinja {

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
  Value get(std::string_view name, const Value& otherwise) {
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

// A text with parts replaced, charged before it is made.
Value replaced(Run& run, std::string_view text, const std::string& what, const std::string& by,
               int64_t limit);
// (key, value) of a mapping.
std::vector<Value> pairs(Run& run, const Value& of);

}  // namespace titanium::jinja
