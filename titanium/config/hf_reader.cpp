#include "titanium/config/hf_reader.h"

#include <cmath>

#include "titanium/base/error.h"

namespace titanium {
namespace {

std::string shown(const Json& value) {
  constexpr size_t kLongest = 80;
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

std::optional<int64_t> as_int64(const Json& value) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return std::nullopt;
  }
  return value.get<int64_t>();
}

}  // namespace

const Json* HfReader::find(std::string_view key) const {
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

void HfReader::fail(std::string_view key, std::string_view why) const {
  const auto it = object_.find(key);
  throw BadConfig("{}: {}{} = {}: {}", source_, prefix_, key, it == object_.end() ? "(absent)" : shown(*it),
                  why);
}

void HfReader::fail_missing(std::string_view key) const {
  throw BadConfig("{}: {}{} is missing", source_, prefix_, key);
}

std::optional<int64_t> HfReader::integer(std::string_view key, int64_t min, int64_t max) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  const std::optional<int64_t> number = as_int64(*value);
  if (!number || *number < min || *number > max)
    fail(key, fmt::format("allowed: an integer from {} to {}", min, max));
  return number;
}

std::optional<double> HfReader::number(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_number() || !std::isfinite(value->get<double>())) fail(key, "allowed: a finite number");
  return value->get<double>();
}

std::optional<double> HfReader::positive(std::string_view key) const {
  const std::optional<double> value = number(key);
  if (value && !(*value > 0)) fail(key, "allowed: a number > 0");
  return value;
}

std::optional<bool> HfReader::boolean(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) fail(key, "allowed: true or false");
  return value->get<bool>();
}

std::optional<std::string> HfReader::text(std::string_view key) const {
  const Json* value = find(key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_string()) fail(key, "allowed: a string");
  return value->get<std::string>();
}

int64_t HfReader::need_integer(std::string_view key, int64_t min, int64_t max) const {
  const std::optional<int64_t> value = integer(key, min, max);
  if (!value) fail_missing(key);
  return *value;
}

std::string HfReader::need_text(std::string_view key) const {
  std::optional<std::string> value = text(key);
  if (!value) fail_missing(key);
  return *std::move(value);
}

double HfReader::need_positive(std::string_view key) const {
  const std::optional<double> value = positive(key);
  if (!value) fail_missing(key);
  return *value;
}

}  // namespace titanium
