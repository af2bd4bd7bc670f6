// Any bytes as run.toml: a config or a BadConfig; and what is printed reads back as the same config.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "titanium/base/error.h"
#include "titanium/config/train_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The bytes after a NUL are overrides, split at further NULs.
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> parts;
  while (true) {
    const size_t end = rest.find('\0');
    parts.emplace_back(rest.substr(0, end));
    if (end == std::string_view::npos) break;
    rest.remove_prefix(end + 1);
  }
  const std::string toml = parts.front();
  parts.erase(parts.begin());
  try {
    const titanium::TrainConfig config = titanium::parse_train_config(toml, "fuzz.toml", parts);
    const std::string printed = titanium::print_train_config(config);
    const std::string again =
        titanium::print_train_config(titanium::parse_train_config(printed, "printed.toml"));
    if (printed != again) __builtin_trap();
  } catch (const titanium::BadConfig&) {
  }
  return 0;
}
