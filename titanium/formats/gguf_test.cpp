#include "titanium/formats/gguf.h"

#include <gtest/gtest.h>

#include "titanium/formats/dtype.h"
#include "titanium/formats/test_util.h"

namespace titanium {
namespace {
using testing::as_span;
using testing::error_of;
using testing::GgufBuilder;
using testing::raw;
using testing::raw_string;

GgufFile open(const std::string& bytes) {
  return GgufFile::from_bytes(as_span(bytes), "test");
}
std::string refusal(const std::string& bytes) {
  const auto error = error_of([&] { open(bytes); });
  EXPECT_SAYS(error, "BadCheckpoint: test: ");
  return error;
}

std::string floats(const std::vector<float>& values) {
  std::string out;
  for (const float value : values) out += raw(value);
  return out;
}

std::string half(float value) {
  return raw(f32_to_f16(value));
}

GgufBuilder every_kind() {
  GgufBuilder b;
  b.key("u8", 0, raw(uint8_t{200})).key("i8", 1, raw(int8_t{-5})).key("u16", 2, raw(uint16_t{60000}));
  b.key("i16", 3, raw(int16_t{-300}))
      .key("u32", 4, raw(uint32_t{4000000000}))
      .key("i32", 5, raw(int32_t{-7}));
  b.f32("f32", 1e-5f).boolean("yes", true).boolean("no", false).text("text", "héllo").text("empty", "");
  b.key("u64", 10, raw(~uint64_t{0})).key("i64", 11, raw(int64_t{-1} << 40)).key("f64", 12, raw(0.1));
  b.texts("words", {"a", "", "ccc"}).i32s("ints", {1, -2, 3}).i32s("none", {});
  const std::string inner = raw(uint32_t{0}) + raw(uint64_t{2}) + "\x01\x02";
  b.key("nested", 9, raw(uint32_t{9}) + raw(uint64_t{2}) + inner + inner);
  b.tensor("f32.t", 0, {2, 3}, floats({1, 2, 3, 4, 5, 6}));
  b.tensor("q8.t", 8, {1, 32}, half(0.5f) + std::string(31, '\x02') + "\xff");
  return b;
}

TEST(Gguf, ReadsEveryValueType) {
  const std::string bytes = every_kind().bytes();
  for (const uint32_t version : {2u, 3u}) {
    GgufBuilder b = every_kind();
    b.version = version;
    const std::string copy = b.bytes();
    EXPECT_EQ(open(copy).version(), version);
  }
  const GgufFile file = open(bytes);
  EXPECT_EQ(file.integer("u8"), 200);
  EXPECT_EQ(file.integer("i8"), -5);
  EXPECT_EQ(file.integer("u16"), 60000);
  EXPECT_EQ(file.integer("i16"), -300);
  EXPECT_EQ(file.integer("u32"), 4000000000);
  EXPECT_EQ(file.integer("i32"), -7);
  EXPECT_EQ(file.integer("i64"), -(int64_t{1} << 40));
  EXPECT_EQ(file.number("f32"), 1e-5);  // the decimal that was meant, not 9.999999747378752e-06
  EXPECT_EQ(file.number("f64"), 0.1);
  EXPECT_EQ(file.number("i32"), -7);
  EXPECT_EQ(file.boolean("yes"), true);
  EXPECT_EQ(file.boolean("no"), false);
  EXPECT_EQ(file.string("text"), "héllo");
  EXPECT_EQ(file.string("empty"), "");
  EXPECT_EQ(file.strings("words"), (std::vector<std::string_view>{"a", "", "ccc"}));
  EXPECT_EQ(file.integers("ints"), (std::vector<int64_t>{1, -2, 3}));
  EXPECT_EQ(file.integers("none"), std::vector<int64_t>{});
  const auto& nested = std::get<GgufValue::Array>(file.metadata().at("nested").data);
  EXPECT_EQ(std::get<uint64_t>(std::get<GgufValue::Array>(nested[1].data)[1].data), 2u);
  EXPECT_FALSE(file.integer("absent"));
  EXPECT_SAYS(error_of([&] { file.integer("u64"); }),
              "BadCheckpoint: test: key 'u64' is not an integer below 2^63");
  EXPECT_SAYS(error_of([&] { file.string("u8"); }), "key 'u8' is not a string");
  EXPECT_SAYS(error_of([&] { file.strings("ints"); }), "key 'ints' is not a list of strings");
  EXPECT_SAYS(error_of([&] { file.integers("text"); }), "key 'text' is not a list of integers");
  EXPECT_SAYS(error_of([&] { file.boolean("f32"); }), "key 'f32' is not a boolean");
  EXPECT_SAYS(error_of([&] { file.number("text"); }), "key 'text' is not a number");
  EXPECT_EQ(file.find_tensor("f32.t")->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(file.find_tensor("x"), nullptr);
}

TEST(Gguf, EveryTruncationOfASmallFileIsRefused) {
  const std::string bytes = every_kind().bytes();
  for (size_t size = 0; size < bytes.size(); ++size) refusal(bytes.substr(0, size));
  EXPECT_NO_THROW(open(bytes));
  EXPECT_NO_THROW(open(bytes + std::string(32, '\0')));  // padding after the last tensor is common
}

TEST(Gguf, DequantizesByTheBlockFormulas) {
  std::string quants;  // byte i holds i in its low and 15 - i in its high half
  for (int i = 0; i < 16; ++i) quants += static_cast<char>(i | (15 - i) << 4);
  std::string signs;
  for (int i = 0; i < 32; ++i) signs += static_cast<char>(i * 8 - 128);
  GgufBuilder b;
  b.tensor("f32", 0, {2, 2}, floats({1.5f, -2, 3, 1e-30f}));
  b.tensor("f16", 1, {2}, half(0.25f) + half(-3));
  b.tensor("bf16", 30, {2}, raw(f32_to_bf16(0.5f)) + raw(f32_to_bf16(-4)));
  b.tensor("q4_0", 2, {2, 32}, half(0.5f) + quants + half(-2) + quants);
  b.tensor("q4_1", 3, {32}, half(0.5f) + half(-1) + quants);
  b.tensor("q8_0", 8, {32}, half(0.125f) + signs);
  b.tensor("scalar", 0, {}, floats({9}));
  const std::string bytes = b.bytes();
  const GgufFile file = open(bytes);
  const auto values = [&](const char* name, int64_t begin, int64_t end) {
    const GgufTensor& tensor = *file.find_tensor(name);
    std::vector<float> out(static_cast<size_t>((end - begin) * tensor.columns()));
    tensor.dequantize(begin, end, out.data());
    return out;
  };
  EXPECT_EQ(values("f32", 0, 2), (std::vector<float>{1.5f, -2, 3, 1e-30f}));
  EXPECT_EQ(values("f32", 1, 2), (std::vector<float>{3, 1e-30f}));
  EXPECT_EQ(values("f16", 0, 1), (std::vector<float>{0.25f, -3}));
  EXPECT_EQ(values("bf16", 0, 1), (std::vector<float>{0.5f, -4}));
  EXPECT_EQ(values("scalar", 0, 1), (std::vector<float>{9}));
  const auto q4_0 = values("q4_0", 0, 2), second = values("q4_0", 1, 2), q4_1 = values("q4_1", 0, 1),
             q8_0 = values("q8_0", 0, 1);
  for (int i = 0; i < 16; ++i) {
    const auto at = static_cast<size_t>(i);
    EXPECT_EQ(q4_0[at], 0.5f * static_cast<float>(i - 8));
    EXPECT_EQ(q4_0[at + 16], 0.5f * static_cast<float>(15 - i - 8));
    EXPECT_EQ(q4_0[at + 32], -2.0f * static_cast<float>(i - 8));
    EXPECT_EQ(second[at + 16], -2.0f * static_cast<float>(15 - i - 8));
    EXPECT_EQ(q4_1[at], 0.5f * static_cast<float>(i) - 1);
    EXPECT_EQ(q4_1[at + 16], 0.5f * static_cast<float>(15 - i) - 1);
  }
  for (int i = 0; i < 32; ++i)
    EXPECT_EQ(q8_0[static_cast<size_t>(i)], 0.125f * static_cast<float>(i * 8 - 128));
  EXPECT_SAYS(error_of([&] { values("f32", 1, 3); }), "tensor 'f32': rows 1 to 3 of 2");
  EXPECT_SAYS(error_of([&] { file.find_tensor("f32")->dequantize(-1, 0, nullptr); }), "rows -1 to 0");
}

TEST(Gguf, LiesAreNamed) {
  const auto head = [](uint64_t tensors, uint64_t keys) {
    return "GGUF" + raw(uint32_t{3}) + raw(tensors) + raw(keys);
  };
  const auto key = [&](uint32_t type, const std::string& value) {
    return GgufBuilder().key("k", type, value).bytes() + std::string(64, '\0');
  };
  const uint64_t huge = uint64_t{1} << 60;
  struct Case {
    std::string bytes;
    const char* says;
  };
  const Case cases[] = {
      {"", "is not a GGUF file"},
      {"GGML" + std::string(100, '\0'), "is not a GGUF file"},
      {"GGUF" + raw(uint32_t{1}) + std::string(100, '\0'), "has GGUF version 1 (allowed: 2 and 3)"},
      {"GGUF" + raw(uint32_t{0x03000000}) + std::string(100, '\0'), "this one is big endian"},
      {head(0, huge), "keys, more than its"},
      {head(huge, 0), "tensors, more than its"},
      {head(~uint64_t{0}, ~uint64_t{0}), "keys, more than its"},
      {head(0, 1) + raw(huge) + std::string(100, 'x'), "key of 1152921504606846976 bytes, allowed are 65535"},
      {head(0, 1) + raw(uint64_t{5000}) + std::string(100, 'x'),
       "key of 5000 bytes at byte 32, but the file ends"},
      {key(13, raw(uint64_t{0})), "key 'k': value type 13 does not exist"},
      {key(7, "\x02"), "key 'k': a boolean that is 2"},
      {key(8, raw(~uint64_t{0})), "key 'k': string of"},
      {key(9, raw(uint32_t{4}) + raw(huge)), "key 'k': array of 1152921504606846976 elements"},
      {key(9, raw(uint32_t{0}) + raw(uint64_t{1000})), "key 'k': array of 1000 elements"},
      {key(9, raw(uint32_t{77}) + raw(uint64_t{1})), "key 'k': array of value type 77"},
      {GgufBuilder().u32("k", 1).u32("k", 2).bytes(), "key 'k': is given twice"},
      {GgufBuilder().u32("general.alignment", 0).bytes(), "general.alignment' is 0"},
      {GgufBuilder().u32("general.alignment", 24).bytes(), "general.alignment' is 24"},
      {GgufBuilder().text("general.alignment", "32").bytes(), "general.alignment' is not an integer"},
      {GgufBuilder().tensor("t", 0, {1}, "1234").tensor("t", 0, {1}, "1234").bytes(),
       "tensor 't' is listed twice"},
      {GgufBuilder().tensor("t", 0, {1, 1, 1, 1, 1}, "1234").bytes(), "tensor 't' has 5 dimensions"},
      {GgufBuilder().tensor("t", 0, {0}, "").bytes(), "tensor 't' has dimension 0 of size 0"},
      {GgufBuilder().tensor("t", 0, {-1}, "").bytes(),
       "tensor 't' has dimension 0 of size 18446744073709551615"},
      {GgufBuilder().tensor("t", 0, {int64_t{1} << 40, int64_t{1} << 40}, "").bytes(), "zero, or too large"},
      {GgufBuilder().tensor("t", 0, {int64_t{1} << 62}, "").bytes(), "tensor 't' has a size that overflows"},
      {GgufBuilder().tensor("t", 0, {1 << 30}, "1234").bytes(),
       "tensor 't' takes 4294967296 bytes from 0 on"},
      {GgufBuilder().tensor("t", 2, {16}, std::string(18, 'x')).bytes(),
       "rows of 16 elements, not a multiple of 32"},
      {GgufBuilder().tensor("t", 12, {256}, std::string(144, 'x')).bytes(),
       "tensor 't' has type Q4_K (allowed: F32,"},
      {GgufBuilder().tensor("t", 4, {256}, std::string(144, 'x')).bytes(), "tensor 't' has type Q4_2"},
      {GgufBuilder().tensor("t", 999, {256}, std::string(144, 'x')).bytes(),
       "tensor 't' has type number 999"},
      {GgufBuilder().tensor_at("t", 0, {1}, 4, "12345678").bytes(),
       "offset 4, not a multiple of the alignment 32"},
      {GgufBuilder().tensor_at("t", 0, {1}, uint64_t{1} << 63, "1234").bytes(), "tensor 't' takes 4 bytes"},
      {GgufBuilder()
           .tensor_at("a", 0, {16}, 0, std::string(64, 'x'))
           .tensor_at("b", 0, {8}, 32, std::string(32, 'x'))
           .bytes(),
       "tensors 'a' and 'b' overlap"},
      {GgufBuilder().tensor_at("a", 0, {1}, 0, "1234").tensor_at("b", 0, {1}, 0, "").bytes(), "overlap"},
  };
  for (const Case& c : cases) EXPECT_SAYS(refusal(c.bytes), c.says);
}

TEST(Gguf, ArraysInArraysAreLimited) {
  std::string body = raw(uint32_t{0}) + raw(uint64_t{0});
  for (int i = 0; i < 3; ++i) body = raw(uint32_t{9}) + raw(uint64_t{1}) + body;
  EXPECT_NO_THROW(open(GgufBuilder().key("k", 9, body).bytes()));
  for (int i = 0; i < 100000; ++i) body = raw(uint32_t{9}) + raw(uint64_t{1}) + body.substr(0, 4096);
  EXPECT_SAYS(refusal(GgufBuilder().key("k", 9, body).bytes()), "nested deeper than 4");
}

TEST(Gguf, ManyArraysOfBytesAreLimitedTogether) {
  GgufBuilder b;
  const std::string body = raw(uint32_t{0}) + raw(uint64_t{3 << 20}) + std::string(3 << 20, 'x');
  b.key("a", 9, body).key("b", 9, body).key("c", 9, body);
  EXPECT_SAYS(refusal(b.bytes()), "key 'c': arrays of more than 8388608 elements together");
}

TEST(Gguf, HonoursTheAlignmentKey) {
  GgufBuilder b;
  b.alignment = 64;
  b.u32("general.alignment", 64).tensor("a", 0, {1}, floats({1})).tensor("b", 0, {1}, floats({2}));
  const std::string bytes = b.bytes();
  float value = 0;
  open(bytes).find_tensor("b")->dequantize(0, 1, &value);
  EXPECT_EQ(value, 2);
}

}  // namespace
}  // namespace titanium
