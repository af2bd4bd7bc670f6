#include "titanium/weights/hash.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace titanium {
namespace {

// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, "XXH64 algorithm description"
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

static_assert(std::endian::native == std::endian::little);

template <typename T>
uint64_t read(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

uint64_t mix(uint64_t lane, uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

void stripes(std::array<uint64_t, 4>& lanes, const std::byte* at, size_t count) {
  uint64_t a = lanes[0], b = lanes[1], c = lanes[2], d = lanes[3];
  for (size_t i = 0; i < count; ++i, at += 32) {
    a = mix(a, read<uint64_t>(at));
    b = mix(b, read<uint64_t>(at + 8));
    c = mix(c, read<uint64_t>(at + 16));
    d = mix(d, read<uint64_t>(at + 24));
  }
  lanes = {a, b, c, d};
}

}  // namespace

Hash64::Hash64() : lanes_{kPrime1 + kPrime2, kPrime2, 0, 0 - kPrime1}, rest_{} {}

void Hash64::add(std::span<const std::byte> bytes) {
  size_ += bytes.size();
  if (rest_size_ > 0) {
    const size_t taken = std::min(bytes.size(), rest_.size() - rest_size_);
    std::copy_n(bytes.data(), taken, rest_.data() + rest_size_);
    rest_size_ += taken;
    bytes = bytes.subspan(taken);
    if (rest_size_ < rest_.size()) return;
    stripes(lanes_, rest_.data(), 1);
    rest_size_ = 0;
  }
  stripes(lanes_, bytes.data(), bytes.size() / 32);
  bytes = bytes.subspan(bytes.size() / 32 * 32);
  std::copy_n(bytes.data(), bytes.size(), rest_.data());
  rest_size_ = bytes.size();
}

uint64_t Hash64::value() const {
  uint64_t h = kPrime5;
  if (size_ >= 32) {
    h = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
        std::rotl(lanes_[3], 18);
    for (uint64_t lane : lanes_) h = (h ^ mix(0, lane)) * kPrime1 + kPrime4;
  }
  h += size_;
  const std::byte* at = rest_.data();
  const std::byte* end = at + rest_size_;
  for (; end - at >= 8; at += 8) h = std::rotl(h ^ mix(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  if (end - at >= 4) {
    h = std::rotl(h ^ read<uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
  }
  for (; at < end; ++at) h = std::rotl(h ^ read<uint8_t>(at) * kPrime5, 11) * kPrime1;
  h = (h ^ h >> 33) * kPrime2;
  h = (h ^ h >> 29) * kPrime3;
  return h ^ h >> 32;
}

uint64_t Hash64::of(std::span<const std::byte> bytes) {
  Hash64 hash;
  hash.add(bytes);
  return hash.value();
}

uint64_t tree_hash(std::span<const std::byte> bytes) {
  Hash64 tree;
  for (size_t at = 0; at < bytes.size(); at += kHashLeaf) {
    const uint64_t leaf = Hash64::of(bytes.subspan(at, std::min(kHashLeaf, bytes.size() - at)));
    tree.add(std::as_bytes(std::span(&leaf, 1)));
  }
  return tree.value();
}

std::string to_hex(uint64_t hash) {
  return fmt::format("{:016x}", hash);
}

bool parse_hex(const std::string& text, uint64_t* out) {
  if (text.size() != 16) return false;
  uint64_t value = 0;
  for (char c : text) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && !(c >= 'a' && c <= 'f')) return false;
    value = value << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  *out = value;
  return true;
}

}  // namespace titanium
