#include "titanium/base/random.h"

#include <cmath>
#include <numeric>

namespace titanium {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  return c;
}

namespace {

// SplitMix64's finaliser: folds the 64-bit stream and the purpose into one counter word without collisions of
// nearby values.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

}  // namespace

Random::Random(uint64_t seed, Purpose purpose, uint64_t stream)
    : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
      purpose_(static_cast<uint32_t>(purpose)),
      stream_(mix(stream + 0x9E3779B97F4A7C15u * purpose_)) {}

uint64_t Random::bits(uint64_t counter) const {
  const auto r = philox4x32({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                             static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)},
                            key_);
  return uint64_t{r[0]} << 32 | r[1];
}

double Random::uniform(uint64_t counter) const {
  return static_cast<double>(bits(counter) >> 11) * 0x1.0p-53;
}

double Random::normal(uint64_t counter) const {
  const auto r = philox4x32({static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32),
                             static_cast<uint32_t>(stream_), static_cast<uint32_t>(stream_ >> 32)},
                            key_);
  const double u = (static_cast<double>((uint64_t{r[0]} << 32 | r[1]) >> 11) + 1) * 0x1.0p-53;  // (0, 1]
  const double v = static_cast<double>((uint64_t{r[2]} << 32 | r[3]) >> 11) * 0x1.0p-53;
  return std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
}

uint64_t Random::below(uint64_t counter, uint64_t bound) const {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits(counter)) * bound) >> 64);
}

std::vector<int64_t> permutation(const Random& random, int64_t n) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = n - 1; i > 0; --i) {
    std::swap(order[static_cast<size_t>(i)],
              order[random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(i) + 1)]);
  }
  return order;
}

uint64_t hash_name(const char* data, uint64_t size) {
  uint64_t h = 0xCBF29CE484222325u;
  for (uint64_t i = 0; i < size; ++i) h = (h ^ static_cast<unsigned char>(data[i])) * 0x100000001B3u;
  return h;
}

}  // namespace titanium
