#include "titanium/report/jsonl.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "titanium/base/error.h"
#include "titanium/report/files.h"

namespace titanium {
namespace {

using Json = nlohmann::ordered_json;

Json as_json(const MetricValue& value) {
  if (const auto* x = std::get_if<double>(&value); x != nullptr && !std::isfinite(*x)) {
    return std::isnan(*x) ? "NaN" : *x < 0 ? "-Infinity" : "Infinity";
  }
  return std::visit([](const auto& x) { return Json(x); }, value);
}

// The step of a line, or empty where it is not one of ours.
std::optional<int64_t> step_of(const std::string& line) {
  const Json json = Json::parse(line, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  const auto step = json.find("step");
  if (step == json.end() || !step->is_number_integer()) return std::nullopt;
  return step->get<int64_t>();
}

[[noreturn]] void fail(const std::filesystem::path& path, const char* what) {
  throw BadConfig("{}: {}: {}", path.string(), what, std::strerror(errno));
}

}  // namespace

std::string metrics_json(int64_t step, const Metrics& metrics) {
  Json json;
  json["step"] = step;
  for (const auto& [key, value] : metrics) {
    if (json.contains(key)) throw Bug("metrics_json: '{}' is there twice", key);
    json[key] = as_json(value);
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

JsonlMetrics::JsonlMetrics(const std::filesystem::path& path, std::optional<int64_t> resumed_step) {
  make_folder(path.parent_path());
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path, ignored)) {
    std::filesystem::path aside = path;
    aside += ".tmp";
    std::ifstream in(path, std::ios::binary);
    std::ofstream out(aside, std::ios::binary | std::ios::trunc);
    for (std::string line; std::getline(in, line);) {
      const std::optional<int64_t> step = step_of(line);
      if (step && resumed_step && *step <= *resumed_step) {
        out << line << '\n';
      } else {
        ++dropped_;
      }
    }
    out.close();
    if (in.bad() || !out) fail(aside, "cannot write");
    const int fd = ::open(aside.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) fail(aside, "cannot open");
    const bool synced = ::fsync(fd) == 0;
    ::close(fd);
    if (!synced) fail(aside, "cannot write");
    if (::rename(aside.c_str(), path.c_str()) != 0) fail(path, "cannot replace");
  }
  fd_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) fail(path, "cannot open");
}

JsonlMetrics::~JsonlMetrics() {
  ::close(fd_);
}

bool JsonlMetrics::write(int64_t step, const Metrics& metrics) {
  return append_whole(fd_, metrics_json(step, metrics) + "\n");
}

}  // namespace titanium
