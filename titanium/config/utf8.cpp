#include "titanium/config/utf8.h"

#include <cstdint>

namespace titanium {

bool is_utf8(std::string_view bytes) {
  for (size_t i = 0; i < bytes.size();) {
    const auto lead = static_cast<uint8_t>(bytes[i]);
    const int more = lead < 0x80 ? 0 : lead >> 5 == 6 ? 1 : lead >> 4 == 14 ? 2 : lead >> 3 == 30 ? 3 : -1;
    if (more < 0 || bytes.size() - i <= static_cast<size_t>(more)) return false;
    uint32_t code = more == 0 ? lead : lead & (0x3fu >> more);
    for (int k = 1; k <= more; ++k) {
      const auto next = static_cast<uint8_t>(bytes[i + static_cast<size_t>(k)]);
      if (next >> 6 != 2) return false;
      code = code << 6 | (next & 0x3fu);
    }
    constexpr uint32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (code < kLeast[more] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
    i += static_cast<size_t>(more) + 1;
  }
  return true;
}

}  // namespace titanium
