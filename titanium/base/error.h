// Failures have kinds, and a kind says what is lost.  A message says who, what was given, what is allowed,
// and the file or config key.
#pragma once
#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace titanium {

enum class ErrorKind {
  kBadConfig,      // refused before work starts; the engine lives on
  kBadData,        // the same, for a data file or a batch
  kBadCheckpoint,  // a weight or checkpoint file cannot be used; nothing is half-loaded
  kRankLost,       // another rank died; resume from the last complete checkpoint
  kBug,            // an invariant of ours is broken; stop and save nothing
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// One class a kind, so that a caller can catch what it can handle.  Built from a fmt string:
//   throw BadConfig("{}: unknown key '{}'", file, key);
template <ErrorKind K>
class ErrorOf : public Error {
 public:
  template <typename... Args>
  explicit ErrorOf(fmt::format_string<Args...> format, Args&&... args)
      : Error(K, fmt::format(format, std::forward<Args>(args)...)) {}
};

using BadConfig = ErrorOf<ErrorKind::kBadConfig>;
using BadData = ErrorOf<ErrorKind::kBadData>;
using BadCheckpoint = ErrorOf<ErrorKind::kBadCheckpoint>;
using RankLost = ErrorOf<ErrorKind::kRankLost>;
using Bug = ErrorOf<ErrorKind::kBug>;

// An error that came from elsewhere, as its class.
[[noreturn]] void throw_error(ErrorKind kind, const std::string& message);

const char* name(ErrorKind kind);  // "BadConfig", ...
int exit_code(ErrorKind kind);     // 2 BadConfig, 3 BadData, 4 BadCheckpoint, 5 RankLost, 70 Bug

}  // namespace titanium
