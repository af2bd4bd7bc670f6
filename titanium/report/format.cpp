#include "titanium/report/format.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace titanium {

std::string human_number(double x) {
  constexpr std::array kUnits = {"", "k", "M", "G", "T", "P", "E"};
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x < 0 ? "-inf" : "inf";
  size_t unit = 0;
  // 999.5 is "1k", not "1e+03".
  while (std::abs(x) >= 999.5 && unit + 1 < kUnits.size()) {
    x /= 1000;
    ++unit;
  }
  return fmt::format("{:.3g}{}", x, kUnits[unit]);
}

std::string human_duration(double seconds) {
  constexpr double kLongest = 1e12;
  if (!(seconds >= 0) || seconds > kLongest) return "?";
  if (seconds < 9.995) return fmt::format("{:.2f}s", seconds);
  const long long whole = std::llround(seconds);
  const long long minutes = whole / 60, hours = minutes / 60, days = hours / 24;
  if (minutes == 0) return fmt::format("{}s", whole);
  if (hours == 0) return fmt::format("{}m{:02}s", minutes, whole % 60);
  if (days == 0) return fmt::format("{}h{:02}m", hours, minutes % 60);
  return fmt::format("{}d{:02}h", days, hours % 24);
}

std::string human_bytes(uint64_t bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  auto x = static_cast<double>(bytes);
  size_t unit = 0;
  while (x >= 1023.995 && unit + 1 < kUnits.size()) {
    x /= 1024;
    ++unit;
  }
  return fmt::format("{:.2f} {}", x, kUnits[unit]);
}

}  // namespace titanium
