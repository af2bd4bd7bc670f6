#include "titanium/formats/safetensors.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <sstream>

#include "titanium/formats/json.h"
#include "titanium/formats/test_util.h"

namespace titanium {
namespace {
namespace fs = std::filesystem;
using testing::as_span;
using testing::error_of;
using testing::put;
using testing::raw;
using testing::TempFolder;

std::string with_header(const std::string& header, const std::string& data = "") {
  return raw(uint64_t{header.size()}) + header + data;
}

const std::string kGood =
    with_header(R"({"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},)"
                R"("a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]}})",
                "0123456789");

TEST(Safetensors, ReadsNamesShapesBytesAndMetadata) {
  const auto file = SafetensorsFile::from_bytes(as_span(kGood), "good");
  ASSERT_EQ(file.tensors().size(), 2u);
  EXPECT_EQ(file.tensors()[0].name, "a");  // in the order of their bytes
  EXPECT_EQ(file.at("a").dtype, Dtype::BF16);
  EXPECT_TRUE(file.at("a").shape.empty());
  EXPECT_EQ(file.at("a").count(), 1);
  EXPECT_EQ(std::memcmp(file.at("a").data, "01", 2), 0);
  EXPECT_EQ(file.at("b").shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(file.at("b").count(), 2);
  EXPECT_EQ(std::memcmp(file.at("b").data, "23456789", 8), 0);
  EXPECT_EQ(file.metadata(), (Metadata{{"format", "pt"}}));
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_SAYS(error_of([&] { file.at("c"); }), "BadCheckpoint: good: has no tensor 'c'");
}

TEST(Safetensors, RowsAreViewsAndChecked) {
  const auto file = SafetensorsFile::from_bytes(as_span(kGood), "good");
  const TensorView row = file.at("b").rows(1, 2);
  EXPECT_EQ(row.shape, (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(row.data, file.at("b").data + 4);
  EXPECT_EQ(row.nbytes, 4u);
  EXPECT_EQ(file.at("b").rows(2, 2).nbytes, 0u);
  for (const auto& [begin, end] : {std::pair{-1, 1}, {0, 3}, {2, 1}}) {
    EXPECT_SAYS(error_of([&, b = begin, e = end] { file.at("b").rows(b, e); }), "tensor 'b': rows");
  }
  EXPECT_SAYS(error_of([&] { file.at("a").rows(0, 1); }), "tensor 'a': rows");
}

TEST(Safetensors, EveryTruncationIsRefused) {
  for (size_t size = 0; size < kGood.size(); ++size) {
    const auto error = error_of(
        [&] { SafetensorsFile::from_bytes(as_span(std::string_view(kGood).substr(0, size)), "cut"); });
    EXPECT_SAYS(error, "BadCheckpoint: cut: ");
  }
}

// Case A08, in its letters: each names the file and the reason.
TEST(Safetensors, A08TruncatedOverlongAndMetadataOnly) {
  TempFolder folder;
  const auto open = [&](const std::string& bytes) {
    put(folder / "m.safetensors", bytes);
    return error_of([&] { SafetensorsFile(folder / "m.safetensors"); });
  };
  const auto file = "BadCheckpoint: " + (folder / "m.safetensors").string();
  struct Case {
    const char* letter;
    std::string bytes;
    const char* says;
  };
  const Case cases[] = {
      {"a: last byte cut", kGood.substr(0, kGood.size() - 1),
       "tensor 'b' ends at byte 10 of the data, but the file has only 9"},
      {"b: 8 bytes appended", kGood + "12345678", "8 bytes after the last tensor belong to none"},
      {"c: header length over the file", raw(uint64_t{1000000}) + kGood.substr(8),
       "the header length says 1000000 bytes"},
      {"d: overlap",
       with_header(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
           "012345"),
       "tensor 'b' begins at byte 2 of the data, expected 4: it overlaps"},
  };
  for (const Case& c : cases) {
    const auto error = open(c.bytes);
    EXPECT_SAYS(error, file) << c.letter;
    EXPECT_SAYS(error, c.says) << c.letter;
  }
  // e: metadata and no tensor
  put(folder / "e.safetensors", with_header(R"({"__metadata__":{"k":"v"}})"));
  const SafetensorsFile empty(folder / "e.safetensors");
  EXPECT_TRUE(empty.tensors().empty());
  EXPECT_EQ(empty.metadata().at("k"), "v");
}

TEST(Safetensors, LyingHeaders) {
  const auto one = [](const std::string& body) { return "{\"t\":" + body + "}"; };
  struct Case {
    std::string header;
    std::string data;
    const char* says;
  };
  const Case cases[] = {
      {"", "", "not a JSON object"},
      {"[]", "", "not a JSON object"},
      {" {}", "", "not a JSON object"},
      {"{", "", "not valid JSON"},
      {"{}x", "", "not valid JSON"},
      {std::string("{}\0", 3), "", "not valid JSON: byte 2 is zero"},
      {"{\"\xff\":1}", "", "not valid JSON"},
      {"{\"a\":" + std::string(100000, '['), "", "nested deeper"},
      {one("1"), "", "tensor 't' is described by a number"},
      {one("null"), "", "tensor 't' is described by a null"},
      {one(R"({"shape":[1],"data_offsets":[0,1]})"), "x", "has no 'dtype'"},
      {one(R"({"dtype":"U8","data_offsets":[0,1]})"), "x", "has no 'shape'"},
      {one(R"({"dtype":"U8","shape":[1]})"), "x", "has no 'data_offsets'"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1})"), "x", "unknown key 'x'"},
      {one(R"({"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]})"), "x", "has dtype 'F8_E4M3'"},
      {one(R"({"dtype":"float32","shape":[1],"data_offsets":[0,4]})"), "xxxx", "has dtype 'float32'"},
      {one(R"({"dtype":7,"shape":[1],"data_offsets":[0,1]})"), "x", "dtype that is not a string"},
      {one(R"({"dtype":"U8","shape":1,"data_offsets":[0,1]})"), "x", "shape that is not a list"},
      {one(R"({"dtype":"U8","shape":[-1],"data_offsets":[0,1]})"), "x", "a size must be an integer"},
      {one(R"({"dtype":"U8","shape":[1.0],"data_offsets":[0,1]})"), "x", "a size must be an integer"},
      {one(R"({"dtype":"U8","shape":["1"],"data_offsets":[0,1]})"), "x", "a size must be an integer"},
      {one(R"({"dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1]})"), "x",
       "a size must be an integer"},
      {one(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})"), "", "overflows"},
      {one(R"({"dtype":"U8","shape":[4294967296,4294967296,0],"data_offsets":[0,0]})"), "", "overflows"},
      {one(R"({"dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0]})"), "", "overflows"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[0]})"), "x", "expected two integers"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[0,1,2]})"), "x", "expected two integers"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[-1,0]})"), "x", "expected two integers"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[0.0,1.0]})"), "x", "expected two integers"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":{"a":0,"b":1}})"), "x", "expected two integers"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[1,0]})"), "x", "run backwards"},
      {one(R"({"dtype":"U8","shape":[2],"data_offsets":[0,1]})"), "x",
       "(1 bytes), but shape [2] of U8 needs 2"},
      {one(R"({"dtype":"U8","shape":[0],"data_offsets":[0,1]})"), "x", "needs 0"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[1,2]})"), "xx", "there is a hole before it"},
      {one(R"({"dtype":"U8","shape":[0],"data_offsets":[1,1]})"), "x", "there is a hole before it"},
      {one(R"({"dtype":"U8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]})"), "x",
       "hole"},
      {R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       "xx", "key 't' is given twice"},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       "x", "tensor 'b' begins at byte 0 of the data, expected 1: it overlaps"},
      {R"({"a":{"dtype":"U8","shape":[1],"dtype":"I8","data_offsets":[0,1]}})", "x",
       "key 'dtype' is given twice"},
      {R"({"__metadata__":1})", "", "__metadata__ is not an object"},
      {R"({"__metadata__":{"a":1}})", "", "__metadata__ key 'a' is not a string"},
      {R"({"__metadata__":{"a":"1","a":"2"}})", "", "key 'a' is given twice"},
  };
  for (const Case& c : cases) {
    const std::string bytes = with_header(c.header, c.data);
    const auto error = error_of([&] { SafetensorsFile::from_bytes(as_span(bytes), "lie"); });
    EXPECT_SAYS(error, "BadCheckpoint: lie: ");
    EXPECT_SAYS(error, c.says) << c.header.substr(0, 200);
  }
  for (const uint64_t length : {uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    const std::string bytes = raw(length) + "{}";
    EXPECT_SAYS(error_of([&] { SafetensorsFile::from_bytes(as_span(bytes), "lie"); }),
                "the header length says");
  }
}

TEST(Safetensors, EmptyTensorsTakeNoBytes) {
  const std::string bytes = with_header(
      R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
      R"("c":{"dtype":"F32","shape":[0],"data_offsets":[1,1]}})",
      "x");
  const auto file = SafetensorsFile::from_bytes(as_span(bytes), "empty");
  EXPECT_EQ(file.at("a").count(), 0);
  EXPECT_EQ(file.at("a").rows(0, 0).nbytes, 0u);
  EXPECT_EQ(file.at("c").nbytes, 0u);
}

TEST(Safetensors, WhatCannotBeOpenedIsNamed) {
  TempFolder folder;
  EXPECT_SAYS(error_of([&] { SafetensorsFile(folder / "none"); }), "none: cannot be opened: No such file");
  EXPECT_SAYS(error_of([&] { SafetensorsFile(folder.path()); }), "is not a regular file");
  put(folder / "empty", "");
  EXPECT_SAYS(error_of([&] { SafetensorsFile(folder / "empty"); }), "0 bytes, too short");
}

// Resident kilobytes of the mapping that holds an address.
int64_t resident_kb(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool here = false;
  while (std::getline(smaps, line)) {
    unsigned long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      const auto at = reinterpret_cast<uintptr_t>(address);
      here = begin <= at && at < end;
    } else if (here && line.starts_with("Rss:")) {
      return std::stoll(line.substr(4));
    }
  }
  return -1;
}

TEST(Safetensors, ASliceDoesNotTouchTheRestOfTheFile) {
  TempFolder folder;
  {
    SafetensorsWriter writer(folder / "big", {{"t", Dtype::F32, {16384, 1024}}}, {}, {false});  // 64 MiB
    const std::vector<std::byte> row(4096, std::byte{7});
    for (int i = 0; i < 16384; ++i) writer.append(row);
    writer.close();
  }
  const SafetensorsFile file(folder / "big");
  const TensorView slice = file.at("t").rows(8000, 8016);
  int sum = 0;
  for (uint64_t i = 0; i < slice.nbytes; ++i) sum += static_cast<int>(slice.data[i]);
  EXPECT_EQ(sum, 7 * 16 * 4096);
  const int64_t kb = resident_kb(slice.data);
  EXPECT_GT(kb, 0);
  EXPECT_LT(kb, 4096);  // of 65536
}

TEST(SafetensorsWriter, LaysTheFileOutAsTheFormatSays) {
  TempFolder folder;
  SafetensorsWriter writer(folder / "f", {{"w", Dtype::F32, {1, 2}}, {"s\"\n", Dtype::U8, {}}},
                           {{"format", "pt"}});
  writer.append(as_span("abc"));
  writer.append(as_span(""));
  writer.append(as_span("defghi"));  // pieces need not end where tensors do
  EXPECT_FALSE(fs::exists(folder / "f"));
  writer.close();
  EXPECT_EQ(folder.files(), 1u);

  const std::string bytes = read_file(folder / "f");
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  EXPECT_EQ(length % 8, 0u);
  ASSERT_EQ(bytes.size(), 8 + length + 9);
  const Json header = Json::parse(bytes.substr(8, length));
  EXPECT_EQ(header, Json::parse(R"({"__metadata__":{"format":"pt"},
    "w":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"s\"\n":{"dtype":"U8","shape":[],"data_offsets":[8,9]}})"));
  EXPECT_EQ(bytes[8], '{');
  EXPECT_EQ(bytes.substr(8 + length), "abcdefghi");
  const SafetensorsFile file(folder / "f");
  EXPECT_EQ(file.at("s\"\n").nbytes, 1u);
}

TEST(SafetensorsWriter, NoTensorsAndOnlyMetadata) {
  TempFolder folder;
  write_safetensors(folder / "f", {}, {{"k", "v"}});
  const SafetensorsFile file(folder / "f");
  EXPECT_TRUE(file.tensors().empty());
  EXPECT_EQ(file.metadata().at("k"), "v");
  write_safetensors(folder / "g", {});
  EXPECT_TRUE(SafetensorsFile(folder / "g").tensors().empty());
}

TEST(SafetensorsWriter, WholeTensorsAreAlignedAndComeBack) {
  TempFolder folder;
  const std::string data = "0123456789abcdefghijklmnopqrstuv";
  const auto* at = reinterpret_cast<const std::byte*>(data.data());
  const std::vector<TensorView> tensors = {{"byte", Dtype::U8, {3}, at, 3},
                                           {"half", Dtype::BF16, {1, 3}, at + 3, 6},
                                           {"wide", Dtype::F64, {2}, at + 9, 16}};
  write_safetensors(folder / "f", tensors);
  const SafetensorsFile file(folder / "f");
  for (const TensorView& tensor : tensors) {
    const TensorView& back = file.at(tensor.name);
    EXPECT_EQ(back.shape, tensor.shape);
    EXPECT_EQ(std::memcmp(back.data, tensor.data, tensor.nbytes), 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(back.data) % static_cast<size_t>(size_of(back.dtype)), 0u)
        << back.name;
  }
  const std::vector<TensorView> wrong = {{"w", Dtype::F64, {2}, at, 15}};
  EXPECT_SAYS(error_of([&] { write_safetensors(folder / "g", wrong); }),
              "tensor 'w' has 15 bytes, its shape needs 16");
}

TEST(SafetensorsWriter, WrongUseLeavesNothing) {
  TempFolder folder;
  const std::vector<TensorSpec> specs = {{"w", Dtype::F32, {2}}};
  { SafetensorsWriter unfinished(folder / "f", specs); }
  EXPECT_EQ(folder.files(), 0u);
  EXPECT_SAYS(error_of([&] {
                SafetensorsWriter writer(folder / "f", specs);
                writer.append(as_span("1234567"));
                writer.close();
              }),
              "7 bytes of tensors were given, 8 are needed");
  EXPECT_SAYS(error_of([&] {
                SafetensorsWriter writer(folder / "f", specs);
                writer.append(as_span("123456789"));
              }),
              "more than the 8 bytes");
  EXPECT_SAYS(error_of([&] {
                SafetensorsWriter(folder / "f", {specs[0], specs[0]});
              }),
              "'w' cannot be written: the name is used twice");
  EXPECT_SAYS(error_of([&] {
                SafetensorsWriter(folder / "f", {{"__metadata__", Dtype::F32, {}}});
              }),
              "reserved");
  EXPECT_SAYS(error_of([&] { SafetensorsWriter(folder / "f", {{"\xff", Dtype::F32, {}}}); }), "UTF-8");
  EXPECT_SAYS(error_of([&] { SafetensorsWriter(folder / "f", {{"n", Dtype::F32, {-1}}}); }), "negative");
  EXPECT_SAYS(error_of([&] {
                SafetensorsWriter(folder / "f", {{"n", Dtype::F32, {int64_t{1} << 62}}});
              }),
              "overflows");
  EXPECT_SAYS(error_of([&] { SafetensorsWriter(folder / "no" / "f", specs); }),
              "cannot be created: No such file");
  EXPECT_EQ(folder.files(), 0u);
}

// A full disk, played by a limit on the size of files: the error carries the system's reason, the old file
// stays.
TEST(SafetensorsWriter, AFullDiskKeepsTheOldFile) {
  TempFolder folder;
  put(folder / "f", "old");
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit tight{1 << 16, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &tight);
  const auto error = error_of([&] {
    SafetensorsWriter writer(folder / "f", {{"w", Dtype::U8, {1 << 22}}});
    const std::vector<std::byte> piece(1 << 18);
    for (int i = 0; i < 16; ++i) writer.append(piece);
    writer.close();
  });
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_SAYS(error, "BadCheckpoint: " + (folder / "f").string() + ": cannot be written: File too large");
  EXPECT_EQ(read_file(folder / "f"), "old");
  EXPECT_EQ(folder.files(), 1u);
}

}  // namespace
}  // namespace titanium
