// Log lines of one rank.  An object, not a process-wide default: ranks may be threads of one process.
#pragma once
#include <fmt/format.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace spdlog {
class logger;
}

namespace titanium {

enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

struct LogOptions {
  int rank = 0;
  int world_size = 1;                // the prefix "[rank 3] " is left out in a world of one
  LogLevel level = LogLevel::kInfo;  // lines below are dropped
  bool only_rank0 = false;           // info lines of other ranks are dropped; warnings never are
  bool timestamps = true;
  // Called before a line is written, for a progress line that must end first.
  std::function<void()> before_line;
  // Takes the lines in place of stderr (without a trailing newline).
  std::function<void(std::string_view)> sink;
};

// Thread-safe.
class Log {
 public:
  explicit Log(LogOptions options = {});
  ~Log();

  template <typename... Args>
  void debug(fmt::format_string<Args...> format, Args&&... args) {
    if (shows(LogLevel::kDebug)) line(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) {
    if (shows(LogLevel::kInfo)) line(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
  }
  // Counted, also where the level hides it.
  template <typename... Args>
  void warn(fmt::format_string<Args...> format, Args&&... args) {
    line(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
  }
  template <typename... Args>
  void error(fmt::format_string<Args...> format, Args&&... args) {
    line(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
  }

  bool shows(LogLevel level) const;
  void line(LogLevel level, std::string_view text);
  int64_t warnings() const { return warnings_; }
  void set_before_line(std::function<void()> before_line);

 private:
  LogOptions options_;
  std::shared_ptr<spdlog::logger> logger_;
  std::mutex mutex_;  // a line and what goes before it stay together
  std::atomic<int64_t> warnings_ = 0;
};

}  // namespace titanium
