// Any bytes as hardware.toml: a machine or a BadConfig; and what is printed reads back.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "titanium/base/error.h"
#include "titanium/config/hardware.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto hardware = titanium::Hardware::parse({reinterpret_cast<const char*>(data), size}, "fuzz.toml");
    const std::string printed = hardware.toml("");
    if (titanium::Hardware::parse(printed, "printed.toml").toml("") != printed) __builtin_trap();
  } catch (const titanium::BadConfig&) {
  }
  return 0;
}
