// Numbers, durations and sizes as a person reads them.
#pragma once
#include <cstdint>
#include <string>

namespace titanium {

// Three significant digits and a power of 1000: "0", "12", "0.0123", "1.23k", "135M", "1.5G"; "nan", "inf",
// "-inf".
std::string human_number(double x);
// "0.52s", "12s", "3m05s", "2h07m", "3d04h"; "?" where it is negative or not finite.
std::string human_duration(double seconds);
// Powers of 1024: "17 B", "1.50 KiB", "6.10 GiB".
std::string human_bytes(uint64_t bytes);

}  // namespace titanium
