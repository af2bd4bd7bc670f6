// Memory of this process, from /proc.
#pragma once
#include <cstdint>

namespace titanium {

uint64_t rss_bytes();       // now resident; 0 where /proc does not say
uint64_t peak_rss_bytes();  // the most that was resident since the start (or since the peak was reset)
// Starts the peak again from what is resident now; false where the system does not allow it.
bool reset_peak_rss();

}  // namespace titanium
