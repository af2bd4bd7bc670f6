// The table of keys behind train_config.h.  Private to this room.
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "titanium/config/train_config.h"

namespace titanium {

using FieldValue = std::variant<bool, int64_t, double, std::string, std::vector<std::string>, Dtype>;

struct FieldCheck {
  std::string allowed;  // in words, after "allowed: "
  std::function<bool(const FieldValue&)> ok;
  bool takes_integer = false;  // a string that may be written as an integer too
};

struct Field {
  std::string name;
  std::variant<bool*, int64_t*, double*, std::string*, std::vector<std::string>*, Dtype*> target;
  std::string doc;
  FieldCheck check;
  std::string alias_of;  // another name of that key; parsed, never printed

  std::string allowed() const;  // in words; the type where the check says nothing
  FieldValue value() const;
  // `target` takes the value, which has its type.
  void assign(const FieldValue& value) const;
};

struct Section {
  std::string name;  // "" for keys outside any section
  std::string doc;
  std::vector<Field> fields;
};

// The table, its targets pointing into `config`.
std::vector<Section> describe(TrainConfig& config);

// Keys (or, with an empty key, sections) of torchtitan that titanium does not have, and what to do instead.
struct LackingKey {
  std::string section, key, reason;
};
std::vector<LackingKey> lacking_keys();

// BadConfig where two keys contradict each other.
void check_together(const TrainConfig& config);

std::string toml_text(const FieldValue& value);  // as a TOML value
std::string key_name(std::string_view section,
                     std::string_view key);  // "section.key", or "key" outside sections

}  // namespace titanium
