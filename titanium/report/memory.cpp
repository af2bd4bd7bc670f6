#include "titanium/report/memory.h"

#include <charconv>
#include <fstream>
#include <string>
#include <string_view>

namespace titanium {
namespace {

// A line "VmRSS:     1234 kB" of /proc/self/status, in bytes.
uint64_t status_bytes(std::string_view key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (!std::string_view(line).starts_with(key)) continue;
    const size_t digit = line.find_first_of("0123456789");
    if (digit == std::string::npos) return 0;
    uint64_t kib = 0;
    std::from_chars(line.data() + digit, line.data() + line.size(), kib);
    return kib * 1024;
  }
  return 0;
}

}  // namespace

uint64_t rss_bytes() {
  return status_bytes("VmRSS:");
}

uint64_t peak_rss_bytes() {
  return status_bytes("VmHWM:");
}

bool reset_peak_rss() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

}  // namespace titanium
