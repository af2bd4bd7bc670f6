// Typed reads of one section of an engine config, which remember what was asked for.
#pragma once
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "titanium/formats/json.h"

namespace titanium {

class ConfigKeys {
 public:
  // `root`: an object with the section, or without it.  BadConfig where the section is no object.  `notes`
  // outlives this.
  ConfigKeys(const Json& root, std::string section, std::string source, std::vector<std::string>& notes);

  // Empty when absent or null; BadConfig for another type.
  const Json* find(const std::string& key);
  std::optional<bool> boolean(const std::string& key);
  std::optional<int64_t> integer(const std::string& key, int64_t least);
  std::optional<double> number(const std::string& key);  // finite
  std::optional<double> number_from(const std::string& key, double least);
  std::optional<std::string> text(const std::string& key);
  std::optional<std::string> one_of(const std::string& key, std::initializer_list<const char*> allowed);
  std::vector<std::string> texts(const std::string& key);  // a string is a list of one

  // A key that changes no result here: any of the values is taken, and one that is not `usual` leaves a note
  // with `why`.
  void no_effect(const std::string& key, const Json& usual, const std::string& why);
  // A key that has to stay at one of the values; others are refused with `why`.
  void only(const std::string& key, std::initializer_list<Json> allowed, const std::string& why);

  [[noreturn]] void fail(const std::string& key,
                         const std::string& why) const;  // "source: section.key = value: why"
  // BadConfig for a key that nobody asked for, with the nearest that somebody did.
  void finish() const;

 private:
  Json object_;
  std::string section_, source_;
  std::vector<std::string>& notes_;
  std::vector<std::string> known_;
};

}  // namespace titanium
