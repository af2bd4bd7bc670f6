// Typed reads of a config.json's keys; every complaint names the file and the key.  Private to this room.
#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "titanium/formats/json.h"

namespace titanium {

class HfReader {
 public:
  // `object` is a JSON object that outlives the reader; `prefix` ("rope_scaling.") starts keys in messages.
  HfReader(const Json& object, std::string source, std::string prefix = "")
      : object_(object), source_(std::move(source)), prefix_(std::move(prefix)) {}

  const std::string& source() const { return source_; }
  const Json* find(std::string_view key) const;  // nullptr when absent or null
  bool has(std::string_view key) const { return object_.contains(key); }

  // Empty when absent or null; BadConfig for another type or a value outside.
  std::optional<int64_t> integer(std::string_view key, int64_t min, int64_t max) const;
  std::optional<double> number(std::string_view key) const;  // finite
  std::optional<double> positive(std::string_view key) const;
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string> text(std::string_view key) const;

  int64_t need_integer(std::string_view key, int64_t min, int64_t max) const;
  std::string need_text(std::string_view key) const;
  double need_positive(std::string_view key) const;

  [[noreturn]] void fail(std::string_view key, std::string_view why) const;  // "file: key = value: why"
  [[noreturn]] void fail_missing(std::string_view key) const;

 private:
  const Json& object_;
  std::string source_;
  std::string prefix_;
};

}  // namespace titanium
