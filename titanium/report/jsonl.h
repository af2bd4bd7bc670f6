// Metrics as JSON lines: {"step": 12, "loss": 2.31, ...}.
#pragma once
#include <cstdint>
#include <filesystem>
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
  // Opens `path` to append, making its folder.  The file keeps the lines of steps <= resumed_step (0: a new
  // run, keeps none; lines that are no JSON object with a step, such as a half-written last one, go too): the
  // kept lines replace the file by rename, so a crash leaves the old file or the new one.  BadConfig with
  // path and reason.
  JsonlMetrics(const std::filesystem::path& path, int64_t resumed_step);
  ~JsonlMetrics();
  JsonlMetrics(const JsonlMetrics&) = delete;
  JsonlMetrics& operator=(const JsonlMetrics&) = delete;

  // One whole line in one write().  A full disk must not end a run: false then, and the line is dropped.
  bool write(int64_t step, const Metrics& metrics);

 private:
  int fd_ = -1;
};

}  // namespace titanium
