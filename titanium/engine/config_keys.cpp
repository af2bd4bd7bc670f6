#include "titanium/engine/config_keys.h"

#include <algorithm>
#include <cmath>

#include "titanium/base/error.h"
#include "titanium/config/nearest.h"

namespace titanium {

ConfigKeys::ConfigKeys(const Json& root, std::string section, std::string source,
                       std::vector<std::string>& notes)
    : object_(Json::object()), section_(std::move(section)), source_(std::move(source)), notes_(notes) {
  const auto found = root.find(section_);
  if (found != root.end() && !found->is_null()) object_ = *found;
  if (!object_.is_object()) throw BadConfig("{}: {} is not an object", source_, section_);
  known_.push_back("_target_");  // hydra's, in every group
}

void ConfigKeys::fail(const std::string& key, const std::string& why) const {
  const auto value = object_.find(key);
  throw BadConfig(
      "{}: {}.{} = {}: {}", source_, section_, key,
      value == object_.end() ? "nothing" : value->dump(-1, ' ', false, Json::error_handler_t::replace), why);
}

const Json* ConfigKeys::find(const std::string& key) {
  known_.push_back(key);
  const auto value = object_.find(key);
  return value == object_.end() || value->is_null() ? nullptr : &*value;
}

std::optional<bool> ConfigKeys::boolean(const std::string& key) {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_boolean()) fail(key, "allowed: true, false");
  return value->get<bool>();
}

std::optional<int64_t> ConfigKeys::integer(const std::string& key, int64_t least) {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  const bool fits =
      value->is_number_integer() && (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
  if (!fits || value->get<int64_t>() < least) fail(key, fmt::format("allowed: an integer >= {}", least));
  return value->get<int64_t>();
}

std::optional<double> ConfigKeys::number(const std::string& key) {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_number() || !std::isfinite(value->get<double>())) fail(key, "allowed: a number");
  return value->get<double>();
}

std::optional<double> ConfigKeys::number_from(const std::string& key, double least) {
  const std::optional<double> value = number(key);
  if (value && *value < least) fail(key, fmt::format("allowed: a number >= {}", least));
  return value;
}

std::optional<std::string> ConfigKeys::text(const std::string& key) {
  const Json* value = find(key);
  if (!value) return std::nullopt;
  if (!value->is_string()) fail(key, "allowed: a string");
  if (value->get_ref<const std::string&>().find('\0') != std::string::npos)
    fail(key, "allowed: a string without a NUL");
  return value->get<std::string>();
}

std::optional<std::string> ConfigKeys::one_of(const std::string& key,
                                              std::initializer_list<const char*> allowed) {
  const std::optional<std::string> value = text(key);
  if (value &&
      std::none_of(allowed.begin(), allowed.end(), [&](const char* name) { return *value == name; })) {
    std::string list;
    for (const char* name : allowed) list += (list.empty() ? "" : ", ") + std::string(name);
    fail(key, "allowed: " + list);
  }
  return value;
}

std::vector<std::string> ConfigKeys::texts(const std::string& key) {
  const Json* value = find(key);
  if (!value) return {};
  if (value->is_string()) return {value->get<std::string>()};
  if (!value->is_array()) fail(key, "allowed: a list of strings");
  std::vector<std::string> out;
  for (const Json& entry : *value) {
    if (!entry.is_string()) fail(key, "allowed: a list of strings");
    out.push_back(entry.get<std::string>());
  }
  return out;
}

void ConfigKeys::no_effect(const std::string& key, const Json& usual, const std::string& why) {
  const Json* value = find(key);
  if (value && *value != usual) {
    notes_.push_back(fmt::format("{}.{} = {} changes nothing: {}", section_, key,
                                 value->dump(-1, ' ', false, Json::error_handler_t::replace), why));
  }
}

void ConfigKeys::only(const std::string& key, std::initializer_list<Json> allowed, const std::string& why) {
  const Json* value = find(key);
  if (value && std::find(allowed.begin(), allowed.end(), *value) == allowed.end()) fail(key, why);
}

void ConfigKeys::finish() const {
  for (const auto& [key, value] : object_.items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    const std::string near = nearest(key, known_);
    throw BadConfig("{}: {} has no key '{}'{}", source_, section_, key,
                    near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near));
  }
}

}  // namespace titanium
