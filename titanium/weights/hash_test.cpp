#include "titanium/weights/hash.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace titanium {
namespace {

uint64_t of(std::string_view text) {
  return Hash64::of(std::as_bytes(std::span(text)));
}

// As `xxhsum -H1` prints them.
TEST(Hash64, KnownAnswers) {
  EXPECT_EQ(of(""), 0xef46db3751d8e999u);
  EXPECT_EQ(of("a"), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(of("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(of("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
  EXPECT_EQ(of("xxhash is a fast hash of 64 bits, 4 lanes of 8 bytes at a time"), 0x784b62c11568f920u);
}

TEST(Hash64, PiecesOfAnySizeGiveTheSame) {
  std::vector<std::byte> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 7);
  for (size_t n : {0u, 1u, 31u, 32u, 33u, 100u, 999u, 1000u}) {
    const std::span<const std::byte> all(bytes.data(), n);
    for (size_t piece : {1u, 3u, 8u, 31u, 32u, 40u, 64u, 500u}) {
      Hash64 hash;
      for (size_t at = 0; at < n; at += piece) hash.add(all.subspan(at, std::min(piece, n - at)));
      ASSERT_EQ(hash.value(), Hash64::of(all)) << n << " bytes in pieces of " << piece;
    }
  }
}

TEST(Hash64, HexIsExact) {
  uint64_t value = 0;
  EXPECT_EQ(to_hex(0xab), "00000000000000ab");
  EXPECT_TRUE(parse_hex("00000000000000ab", &value));
  EXPECT_EQ(value, 0xabu);
  for (const char* bad : {"", "ab", "00000000000000AB", "00000000000000ag", "00000000000000ab "}) {
    EXPECT_FALSE(parse_hex(bad, &value)) << bad;
  }
}

}  // namespace
}  // namespace titanium
