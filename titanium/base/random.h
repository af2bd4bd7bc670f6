// Counter-based random numbers: every number is a pure function of (seed, purpose, counter).  No state is
// kept, so nothing has to be saved, and the layout of ranks cannot change a draw (design D5).
#pragma once
#include <array>
#include <cstdint>
#include <vector>

namespace titanium {

// What a draw is for.  Two purposes never share a stream.
enum class Purpose : uint32_t {
  kInit = 1,
  kShuffle = 2,
  kSplit = 3,
  kSample = 4,
  kDropout = 5,
  kLoss = 6,
  kTest = 100
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

class Random {
 public:
  // `stream` separates uses of one purpose: an epoch, a step, the hash of a weight's name.
  Random(uint64_t seed, Purpose purpose, uint64_t stream = 0);

  uint64_t bits(uint64_t counter) const;                   // 64 random bits
  double uniform(uint64_t counter) const;                  // in [0, 1), 53 bits
  double normal(uint64_t counter) const;                   // mean 0, standard deviation 1 (Box-Muller)
  uint64_t below(uint64_t counter, uint64_t bound) const;  // in [0, bound), bound > 0; bias < bound / 2^64

 private:
  std::array<uint32_t, 2> key_;
  uint32_t purpose_;
  uint64_t stream_;
};

// A permutation of 0..n-1, a pure function of the random stream (Fisher-Yates).
std::vector<int64_t> permutation(const Random& random, int64_t n);

uint64_t hash_name(const char* data, uint64_t size);  // FNV-1a, for a stream from a name

}  // namespace titanium
