#include "titanium/report/log.h"

#include <spdlog/logger.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/sinks/stdout_sinks.h>

namespace titanium {
namespace {

class CallbackSink : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit CallbackSink(std::function<void(std::string_view)> sink) : sink_(std::move(sink)) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t text;
    formatter_->format(message, text);
    sink_({text.data(), text.size()});
  }
  void flush_() override {}

 private:
  std::function<void(std::string_view)> sink_;
};

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

std::string_view word(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug: ";
    case LogLevel::kWarning:
      return "warning: ";
    case LogLevel::kError:
      return "error: ";
    default:
      return "";
  }
}

std::shared_ptr<spdlog::logger> make_logger(const LogOptions& options) {
  const bool own_sink = options.sink != nullptr;
  spdlog::sink_ptr sink;
  if (own_sink) {
    sink = std::make_shared<CallbackSink>(options.sink);
  } else {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  }
  // Not registered: spdlog's registry is process-wide.
  auto logger = std::make_shared<spdlog::logger>("", std::move(sink));
  logger->set_formatter(
      std::make_unique<spdlog::pattern_formatter>(options.timestamps ? "%Y-%m-%d %H:%M:%S %v" : "%v",
                                                  spdlog::pattern_time_type::local, own_sink ? "" : "\n"));
  logger->set_level(spdlog_level(options.level));
  logger->flush_on(spdlog::level::trace);
  return logger;
}

}  // namespace

Log::Log(LogOptions options) : options_(std::move(options)), logger_(make_logger(options_)) {}

Log::~Log() = default;

bool Log::shows(LogLevel level) const {
  if (options_.only_rank0 && options_.rank != 0 && level < LogLevel::kWarning) return false;
  return logger_->should_log(spdlog_level(level));
}

void Log::line(LogLevel level, std::string_view text) {
  if (level == LogLevel::kWarning) ++warnings_;
  if (!shows(level)) return;
  const std::string prefix = options_.world_size > 1 ? fmt::format("[rank {}] ", options_.rank) : "";
  const std::lock_guard lock(mutex_);
  if (options_.before_line) options_.before_line();
  logger_->log(spdlog_level(level), "{}{}{}", prefix, word(level), text);
}

void Log::set_before_line(std::function<void()> before_line) {
  const std::lock_guard lock(mutex_);
  options_.before_line = std::move(before_line);
}

}  // namespace titanium
