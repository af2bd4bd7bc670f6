// XXH64, the 64-bit hash of the xxHash specification (seed 0): several times faster than a disk, and `xxhsum
// -H1` gives the same.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace titanium {

class Hash64 {
 public:
  Hash64();
  void add(std::span<const std::byte> bytes);  // pieces of any size
  uint64_t value() const;                      // of all bytes so far

  static uint64_t of(std::span<const std::byte> bytes);

 private:
  std::array<uint64_t, 4> lanes_;
  std::array<std::byte, 32> rest_;
  size_t rest_size_ = 0;
  uint64_t size_ = 0;
};

// XXH64 of the XXH64 (little endian) of each 4096 bytes, the last ones may be fewer: pieces can be hashed in
// any order and at once, by threads here and by vectors of numpy at the other end.
constexpr size_t kHashLeaf = 4096;
uint64_t tree_hash(std::span<const std::byte> bytes);

std::string to_hex(uint64_t hash);                       // 16 digits
bool parse_hex(const std::string& text, uint64_t* out);  // exactly that form

}  // namespace titanium
