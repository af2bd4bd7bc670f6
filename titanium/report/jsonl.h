// Metrics as JSON lines: {"step": 12, "loss": 2.31, ...}.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace titanium {

using MetricValue = std::variant<double, int64_t, bool, std::string>;
// In the order in which they are written.
using Metrics = std::vector<std::pair<std::string, MetricValue>>;

// {"step": ..., ...}.  JSON has no NaN or infinity: they become the strings "NaN", "Infinity", "-Infinity",
// as transformers writes them.
std::string metrics_json(int64_t step, const Metrics& metrics);

class JsonlMetrics {
 public:
  // Opens `path` to append, making its folder.  A resumed run keeps the lines of steps <= resumed_step and
  // drops those that it will write again; a new run (empty) keeps none.  A line that is no JSON object with a
  // step, such as a half-written last one, goes too.  What is kept replaces the file by rename, so that a
  // crash leaves the old file or the new one.  BadConfig with path and reason.
  JsonlMetrics(const std::filesystem::path& path, std::optional<int64_t> resumed_step);
  ~JsonlMetrics();
  JsonlMetrics(const JsonlMetrics&) = delete;
  JsonlMetrics& operator=(const JsonlMetrics&) = delete;

  // One whole line in one write().  A full disk must not end a run: false then, and the line is dropped.
  bool write(int64_t step, const Metrics& metrics);
  int64_t dropped_lines() const { return dropped_; }  // by the constructor

 private:
  int fd_ = -1;
  int64_t dropped_ = 0;
};

}  // namespace titanium
