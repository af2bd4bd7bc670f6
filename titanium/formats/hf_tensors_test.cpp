#include "titanium/formats/hf_tensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "titanium/formats/json.h"
#include "titanium/formats/test_util.h"

namespace titanium {
namespace {
namespace fs = std::filesystem;
using testing::as_span;
using testing::error_of;
using testing::put;
using testing::TempFolder;

const fs::path kModels = fs::path(TITANIUM_SOURCE_DIR) / "tests/data/models";

std::vector<TensorSource> copy_of(const HfTensors& from) {
  std::vector<TensorSource> sources;
  for (const std::string& name : from.names()) {
    const TensorView& view = from.at(name);
    sources.push_back({{view.name, view.dtype, view.shape}, [&view](const ByteSink& sink) {
                         const uint64_t half = view.nbytes / 2;  // in two pieces
                         sink({view.data, half});
                         sink({view.data + half, view.nbytes - half});
                       }});
  }
  return sources;
}

void expect_equal(const HfTensors& a, const HfTensors& b) {
  ASSERT_EQ(a.names(), b.names());
  for (const std::string& name : a.names()) {
    EXPECT_EQ(a.at(name).shape, b.at(name).shape) << name;
    EXPECT_EQ(a.at(name).dtype, b.at(name).dtype) << name;
    ASSERT_EQ(a.at(name).nbytes, b.at(name).nbytes) << name;
    EXPECT_EQ(std::memcmp(a.at(name).data, b.at(name).data, a.at(name).nbytes), 0) << name;
  }
}

// Case A01: a sharded model, saved unchanged, has an index that says exactly what is in the files.
TEST(HfTensors, A01ShardedModelIsSavedWithItsIndex) {
  const HfTensors from(kModels / "qwen2");
  ASSERT_EQ(from.files().size(), 3u);
  TempFolder folder;
  write_hf_tensors(folder.path(), copy_of(from), {.max_shard_bytes = 200'000});
  const Json index = read_json(folder / "model.safetensors.index.json");

  std::set<std::string> physical, files;
  uint64_t bytes = 0;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string file = entry.path().filename().string();
    files.insert(file);
    const SafetensorsFile shard(entry.path());
    EXPECT_EQ(shard.metadata().at("format"), "pt");
    for (const TensorView& tensor : shard.tensors()) {
      EXPECT_TRUE(physical.insert(tensor.name).second);
      EXPECT_EQ(index["weight_map"].at(tensor.name), file);
      bytes += tensor.nbytes;
    }
  }
  EXPECT_EQ(files,
            (std::set<std::string>{"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                                   "model-00003-of-00003.safetensors"}));
  EXPECT_EQ(index["weight_map"].size(), physical.size());
  EXPECT_EQ(index["metadata"]["total_size"], bytes);
  EXPECT_EQ(bytes, from.total_bytes());
  expect_equal(from, HfTensors(folder.path()));
}

TEST(HfTensors, OneFileWhenItFits) {
  const HfTensors from(kModels / "llama_bf16");
  TempFolder folder;
  write_hf_tensors(folder.path(), copy_of(from));
  EXPECT_EQ(folder.files(), 1u);
  expect_equal(from, HfTensors(folder.path()));
}

TEST(HfTensors, ATensorOverTheLimitGetsItsOwnShard) {
  const std::string data(100, 'x');
  const auto source = [&](const char* name, int64_t bytes) {
    return TensorSource{{name, Dtype::U8, {bytes}},
                        [&data, bytes](const ByteSink& sink) { sink(as_span(data).first(size_t(bytes))); }};
  };
  TempFolder folder;
  write_hf_tensors(folder.path(),
                   std::vector{source("a", 4), source("b", 100), source("c", 4), source("d", 6)},
                   {.max_shard_bytes = 10});
  const HfTensors back(folder.path());
  ASSERT_EQ(back.files().size(), 3u);
  EXPECT_EQ(back.files()[2].tensors().size(), 2u);
  EXPECT_EQ(back.total_bytes(), 114u);
}

TEST(HfTensors, ASourceThatLiesIsNamed) {
  TempFolder folder;
  const auto source = [](const char* bytes) {
    return std::vector{
        TensorSource{{"w", Dtype::F32, {1}}, [=](const ByteSink& sink) { sink(as_span(bytes)); }}};
  };
  EXPECT_SAYS(error_of([&] { write_hf_tensors(folder.path(), source("123")); }),
              "tensor 'w' has 4 bytes, 3 were produced");
  EXPECT_SAYS(error_of([&] { write_hf_tensors(folder.path(), source("12345")); }),
              "tensor 'w' has 4 bytes, more");
  auto twice = source("1234");
  twice.push_back(twice[0]);
  EXPECT_SAYS(error_of([&] { write_hf_tensors(folder.path(), twice, {.max_shard_bytes = 4}); }),
              "tensor 'w' is given twice");
  EXPECT_EQ(folder.files(), 0u);
  write_hf_tensors(folder.path(), source("1234"));
  EXPECT_SAYS(error_of([&] { write_hf_tensors(folder.path(), source("1234")); }),
              "holds weights already (model.safetensors)");
}

// Two small shards with an index to be spoilt.
class Index : public ::testing::Test {
 protected:
  void SetUp() override {
    shard("s1.safetensors", {"a", "b"});
    shard("s2.safetensors", {"c"});
  }
  void shard(const char* file, const std::vector<std::string>& names) {
    static const std::byte kByte{1};
    std::vector<TensorView> tensors;
    for (const auto& name : names) tensors.push_back({name, Dtype::U8, {1}, &kByte, 1});
    write_safetensors(folder_ / file, tensors);
  }
  std::string open(const std::string& index) {
    put(folder_ / "model.safetensors.index.json", index);
    const auto error = error_of([&] { HfTensors(folder_.path()); });
    if (error != "nothing") {
      EXPECT_SAYS(error, "BadCheckpoint: " + folder_.path().string());
    }
    return error;
  }
  TempFolder folder_;
};

TEST_F(Index, GoodOneOpens) {
  EXPECT_EQ(open(R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors"}})"),
            "nothing");
  const HfTensors tensors(folder_.path());
  EXPECT_EQ(tensors.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(tensors.find("d"), nullptr);
  EXPECT_SAYS(error_of([&] { tensors.at("d"); }), "has no tensor 'd'");
}

TEST_F(Index, EveryDisagreementIsNamed) {
  EXPECT_SAYS(
      open(
          R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors","d":"s2.safetensors"}})"),
      "tensor 'd' is missing");
  EXPECT_SAYS(open(R"({"weight_map":{"a":"s1.safetensors","c":"s2.safetensors"}})"),
              "tensor 'b' is unexpected");
  EXPECT_SAYS(open(R"({"weight_map":{"a":"s1.safetensors","b":"s2.safetensors","c":"s2.safetensors"}})"),
              "tensor 'b' is missing from 's2.safetensors'");
  EXPECT_SAYS(open(R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s3.safetensors"}})"),
              "names the shard 's3.safetensors', which is missing");
  EXPECT_SAYS(open(R"({"weight_map":{}})"), "model.safetensors.index.json: weight_map names no tensor");
  EXPECT_SAYS(open(R"({"weight_map":{"a":"s1.safetensors","a":"s2.safetensors"}})"),
              "key 'a' is given twice");
  shard("s2.safetensors", {"c", "b"});
  EXPECT_SAYS(open(R"({"weight_map":{"a":"s1.safetensors","b":"s1.safetensors","c":"s2.safetensors"}})"),
              "tensor 'b' is duplicated");
}

TEST_F(Index, OtherFormsAreRefused) {
  EXPECT_SAYS(open("{"), "not valid JSON");
  EXPECT_SAYS(open("[]"), "has no object 'weight_map'");
  EXPECT_SAYS(open(R"({"weight_map":[]})"), "has no object 'weight_map'");
  EXPECT_SAYS(open(R"({"weight_map":{"a":1}})"), "weight_map['a'] is not a file name");
  for (const char* name :
       {"", ".", "..", "../s1.safetensors", "/etc/passwd", "x/s1.safetensors", "x\\\\y", "a\\u0000b"}) {
    EXPECT_SAYS(open(fmt::format(R"({{"weight_map":{{"a":"{}"}}}})", name)), "must be a plain file name");
  }
}

TEST(HfTensors, FoldersWithoutWeights) {
  TempFolder folder;
  EXPECT_SAYS(error_of([&] { HfTensors(folder / "no"); }), "is not a folder");
  EXPECT_SAYS(error_of([&] { HfTensors(folder.path()); }), "has neither model.safetensors nor");
}

}  // namespace
}  // namespace titanium
