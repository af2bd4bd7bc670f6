#include "titanium/weights/receive.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "titanium/formats/hf_tensors.h"
#include "titanium/formats/test_util.h"
#include "titanium/weights/hf_export.h"
#include "titanium/weights/scalar_type.h"
#include "titanium/weights/sync_wire.h"
#include "titanium/weights/test_store.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;
using testing::bytes_of;
using testing::error_of;
using testing::kModels;
using testing::ModelStore;
using testing::TempFolder;

// The messages of a stream, as they would cross a socket.
std::vector<std::string> messages_of(BucketStream stream) {
  std::vector<std::string> messages = {begin_message(stream.header())};
  while (const auto bucket = stream.next()) {
    messages.push_back(bucket_message_head(stream.header(), *bucket));
    messages.back().append(reinterpret_cast<const char*>(bucket->bytes.data()), bucket->bytes.size());
  }
  messages.push_back(end_message(stream.header(), stream.checksum()));
  return messages;
}

std::optional<ReceiveReport> take(WeightReceiver& receiver, const std::vector<std::string>& messages) {
  std::optional<ReceiveReport> report;
  for (const std::string& message : messages) {
    EXPECT_FALSE(report) << "a report before the end";
    report = receiver.take(std::as_bytes(std::span(message)));
  }
  return report;
}

// Name and bytes of every file.
std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder))
    files[entry.path().filename().string()] = read_file(entry.path());
  return files;
}

void expect_same(const fs::path& a, const fs::path& b) {
  const HfTensors one(a), other(b);
  ASSERT_EQ(one.names(), other.names());
  for (const std::string& name : one.names()) {
    const TensorView &x = one.at(name), &y = other.at(name);
    EXPECT_EQ(x.dtype, y.dtype) << name;
    EXPECT_EQ(x.shape, y.shape) << name;
    EXPECT_TRUE(x.nbytes == y.nbytes && std::memcmp(x.data, y.data, x.nbytes) == 0) << name;
  }
}

// A folder of older weights of the model, and the store of the newer ones.
struct Pair {
  explicit Pair(const std::string& name, Dtype dtype = Dtype::BF16, uint64_t shard_bytes = uint64_t{1} << 40)
      : model(kModels / name), dtype(dtype) {
    ModelStore older(kModels / name);
    older.store->init(7);
    const HfExportOptions options = {.dtype = dtype, .max_shard_bytes = shard_bytes, .fsync = false};
    export_hf(*older.store, Json::object(), temp / "here", options);
    export_hf(*model.store, Json::object(), temp / "want", options);
  }
  std::vector<std::string> messages(SyncOptions options = {.bucket_bytes = 50000}) {
    options.dtype = dtype;
    return messages_of(BucketStream(*model.store, options));
  }
  WeightReceiver receiver() { return WeightReceiver(temp / "here", {.fsync = false}); }
  fs::path here() const { return temp / "here"; }
  fs::path want() const { return temp / "want"; }

  TempFolder temp;
  ModelStore model;
  Dtype dtype;
};

TEST(Receive, AFolderIsBitEqualToTheExport) {
  for (const char* name : {"llama3", "llama_bf16", "llama_tied", "qwen3_tied"}) {
    for (const Dtype dtype : {Dtype::F32, Dtype::BF16}) {
      for (const uint64_t shard : {uint64_t{1} << 40, uint64_t{60000}}) {  // one file; an index and shards
        SCOPED_TRACE(fmt::format("{} {} {}", name, torch_name(dtype), shard));
        Pair pair(name, dtype, shard);
        WeightReceiver receiver = pair.receiver();
        EXPECT_FALSE(receiver.version());
        for (const int64_t version : {3, 8}) {
          const size_t files = files_of(pair.here()).size();
          const auto report = take(receiver, pair.messages({.bucket_bytes = 50000, .version = version}));
          ASSERT_TRUE(report);
          EXPECT_EQ(report->version, version);
          EXPECT_EQ(report->updated, static_cast<int64_t>(pair.model.table.weights().size()));
          EXPECT_TRUE(report->not_updated.empty());
          EXPECT_TRUE(report->unknown.empty());
          expect_same(pair.here(), pair.want());
          EXPECT_EQ(files_of(pair.here()).size(), files);
          // Known to whoever comes next.
          WeightReceiver later = pair.receiver();
          EXPECT_EQ(later.version(), version);
        }
      }
    }
  }
}

// F01: a receiver with a head of its own gets it.
TEST(Receive, ATiedModelFillsASeparateHead) {
  ModelStore model(kModels / "llama_tied");
  std::map<std::string, at::Tensor> tensors;
  for (const auto& weight : model.table.weights())
    tensors[weight->name()] = at::zeros(weight->shape(), at::kBFloat16);
  tensors["lm_head.weight"] = at::zeros(tensors.at("model.embed_tokens.weight").sizes(), at::kBFloat16);
  WeightReceiver receiver(tensors);
  ReceiveReport report = receiver.take_all(BucketStream(*model.store, {}));
  EXPECT_EQ(report.not_updated, (std::vector<std::string>{"lm_head.weight"}));
  report = receiver.take_all(BucketStream(*model.store, {.tied_head = true}));
  EXPECT_TRUE(report.not_updated.empty());
  EXPECT_EQ(report.updated, static_cast<int64_t>(tensors.size()));
  for (const auto& [name, tensor] : tensors) {
    const std::string of = name == "lm_head.weight" ? "model.embed_tokens.weight" : name;
    EXPECT_EQ(bytes_of(tensor), bytes_of(model.param(of).to(at::kBFloat16))) << name;
  }
}

TEST(Receive, TensorsInPlaceOfAnyLayoutAndByOptionOfAnotherDtype) {
  ModelStore model(kModels / "llama3");
  std::map<std::string, at::Tensor> wide, turned;
  for (const auto& weight : model.table.weights()) {
    wide[weight->name()] = at::zeros(weight->shape(), at::kFloat);
    const at::Tensor plain = at::zeros(weight->shape(), at::kBFloat16);
    turned[weight->name()] =
        plain.dim() == 2 ? at::zeros({plain.size(1), plain.size(0)}, at::kBFloat16).t() : plain;
  }
  WeightReceiver strict(wide);
  EXPECT_SAYS(error_of([&] { strict.take_all(BucketStream(*model.store, {})); }), "comes as bfloat16 [");
  EXPECT_EQ(wide.at("model.norm.weight").abs().sum().item<float>(), 0);
  WeightReceiver converting(wide, {.convert = true}), other(turned);
  converting.take_all(BucketStream(*model.store, {}));
  other.take_all(BucketStream(*model.store, {}));
  for (const auto& weight : model.table.weights()) {
    const at::Tensor want = model.param(weight->name()).view(weight->shape()).to(at::kBFloat16);
    EXPECT_TRUE(at::equal(wide.at(weight->name()), want.to(at::kFloat)));
    EXPECT_TRUE(at::equal(turned.at(weight->name()), want));
  }
}

TEST(Receive, AnOldVersionIsRefusedAndBothAreNamed) {
  Pair pair("llama3");
  WeightReceiver receiver = pair.receiver();
  take(receiver, pair.messages({.version = 12}));
  const auto before = files_of(pair.here());
  for (const int64_t version : {12, 5}) {
    WeightReceiver again = pair.receiver();
    const std::string error = error_of([&] { take(again, pair.messages({.version = version})); });
    EXPECT_SAYS(
        error,
        fmt::format("BadData: {}: weights of version {} came, but those here are of version 12 already",
                    pair.here().string(), version));
    EXPECT_FALSE(again.open());
  }
  EXPECT_EQ(files_of(pair.here()), before);
  take(receiver, pair.messages({.version = 13}));
}

TEST(Receive, SaysWhatWasNotUpdatedAndWhatIsUnknown) {
  for (const uint64_t shard : {uint64_t{1} << 40, uint64_t{60000}}) {
    Pair pair("llama3", Dtype::BF16, shard);
    testing::StoreOf part({{"model.norm.weight", {64}}, {"model.extra.weight", {4}}});
    const HfTensors older(pair.here());
    ASSERT_EQ(older.at("model.norm.weight").shape, (std::vector<int64_t>{64}));
    const TensorView kept = older.at("model.embed_tokens.weight");
    WeightReceiver receiver = pair.receiver();
    const auto report = take(receiver, messages_of(BucketStream(*part.store, {})));
    EXPECT_EQ(report->updated, 1);
    EXPECT_EQ(report->unknown, (std::vector<std::string>{"model.extra.weight"}));
    EXPECT_EQ(report->not_updated.size(), older.size() - 1);
    const HfTensors now(pair.here());
    EXPECT_EQ(now.names(), older.names());
    EXPECT_EQ(std::memcmp(now.at("model.embed_tokens.weight").data, kept.data, kept.nbytes), 0);
    EXPECT_EQ(std::memcmp(now.at("model.norm.weight").data,
                          part.param("model.norm.weight").to(at::kBFloat16).const_data_ptr(), 128),
              0);
  }
}

TEST(Receive, ShapesAndDtypesMustBeThoseOfTheTarget) {
  Pair pair("llama3");
  const auto before = files_of(pair.here());
  testing::StoreOf shape({{"model.norm.weight", {65}}});
  WeightReceiver receiver = pair.receiver();
  EXPECT_SAYS(error_of([&] { take(receiver, messages_of(BucketStream(*shape.store, {}))); }),
              "tensor 'model.norm.weight' comes as bfloat16 [65], but is bfloat16 [64] here");
  EXPECT_SAYS(
      error_of([&] { take(receiver, messages_of(BucketStream(*pair.model.store, {.dtype = Dtype::F32}))); }),
      "comes as float32 [");
  EXPECT_EQ(files_of(pair.here()), before);
}

// Whatever is done to a stream: the folder is as it was, and the next whole stream arrives.
TEST(Receive, ABrokenStreamLeavesTheFolderAsItWas) {
  for (const uint64_t shard : {uint64_t{1} << 40, uint64_t{60000}}) {
    Pair pair("llama3", Dtype::BF16, shard);
    const auto before = files_of(pair.here());
    const auto whole = pair.messages();
    ASSERT_GT(whole.size(), 4u);
    WeightReceiver receiver = pair.receiver();
    const auto broken = [&](const std::function<void(std::vector<std::string>&)>& damage,
                            const std::string& says) {
      auto messages = whole;
      damage(messages);
      const std::string error = error_of([&] { take(receiver, messages); });
      EXPECT_SAYS(error, "BadData: ");
      EXPECT_SAYS(error, says);
      EXPECT_FALSE(receiver.open());
      EXPECT_EQ(files_of(pair.here()), before) << says;
    };
    for (size_t i = 1; i + 1 < whole.size(); ++i) {
      broken([&](auto& m) { m[i].back() ^= 1; }, "is damaged: its checksum is");
      broken([&](auto& m) { m[i].pop_back(); }, "truncated");
      broken([&](auto& m) { m.erase(m.begin() + i); },
             fmt::format("where message {} of version 1 should", i));
      broken([&](auto& m) { m.insert(m.begin() + i, m[i]); }, "where message");
    }
    broken([&](auto& m) { std::swap(m[1], m[2]); }, "where message 1 of version 1 should");
    broken([&](auto& m) { m.erase(m.begin()); }, "comes before its begin");
    broken([&](auto& m) { m[2] = m[0]; }, "begins before the one of version 1 has ended");
    broken(
        [&](auto& m) {
          const size_t at = m.back().find("checksum\":\"") + 11;
          m.back()[at] = m.back()[at] == '0' ? '1' : '0';
        },
        "the stream of weights (version 1) is damaged");
    broken([&](auto& m) { m[1] = ""; }, "too short");

    // A sender that dies: nothing more comes.
    {
      WeightReceiver lonely = pair.receiver();
      take(lonely, {whole[0], whole[1]});
      EXPECT_TRUE(lonely.open());
    }
    EXPECT_EQ(files_of(pair.here()), before);
    // A receiver that was killed left these.
    testing::put(pair.here() / "model.safetensors.sync-partial", "half");
    if (shard < 100000) testing::put(pair.here() / "model-00001-of-00002.v9.safetensors", "half");
    EXPECT_TRUE(take(receiver, whole));
    expect_same(pair.here(), pair.want());
    EXPECT_EQ(files_of(pair.here()).size(), before.size());
  }
}

// In one process nothing is encoded; what a receiver sees is the same.
TEST(Receive, MessagesWithoutBytesAreThoseThatDecodingGives) {
  ModelStore model(kModels / "llama_tied");
  const SyncOptions options{
      .keep_fp32 = {"model.norm.weight"}, .tied_head = true, .bucket_bytes = 50000, .version = 3};
  const auto messages = messages_of(BucketStream(*model.store, options));
  BucketStream stream(*model.store, options);
  size_t next = 0;
  const auto expect_equal = [&](const StreamMessage& made) {
    const StreamMessage decoded = decode_stream_message(std::as_bytes(std::span(messages.at(next++))));
    EXPECT_EQ(made.kind, decoded.kind);
    EXPECT_EQ(made.version, decoded.version);
    EXPECT_EQ(made.index, decoded.index);
    EXPECT_EQ(made.header.buckets, decoded.header.buckets);
    EXPECT_EQ(made.header.bytes, decoded.header.bytes);
    EXPECT_EQ(made.header.tensors.size(), decoded.header.tensors.size());
    EXPECT_EQ(made.checksum, decoded.checksum);
    EXPECT_EQ(made.checksums, decoded.checksums);
    ASSERT_EQ(made.tensors.size(), decoded.tensors.size());
    for (const TensorView& tensor : made.tensors) {
      const auto same = std::find_if(decoded.tensors.begin(), decoded.tensors.end(),
                                     [&](const TensorView& t) { return t.name == tensor.name; });
      ASSERT_NE(same, decoded.tensors.end()) << tensor.name;
      EXPECT_EQ(tensor.dtype, same->dtype);
      EXPECT_EQ(tensor.shape, same->shape);
      ASSERT_EQ(tensor.nbytes, same->nbytes);
      EXPECT_EQ(std::memcmp(tensor.data, same->data, tensor.nbytes), 0) << tensor.name;
    }
  };
  expect_equal(begin_of(stream.header()));
  while (const auto bucket = stream.next()) expect_equal(bucket_of(stream.header(), *bucket));
  expect_equal(end_of(stream.header(), stream.checksum()));
  EXPECT_EQ(next, messages.size());
}

TEST(Receive, AnAnnouncedTensorMustCome) {
  testing::StoreOf both({{"a", {8}}, {"b", {8}}});
  std::map<std::string, at::Tensor> tensors = {{"a", at::zeros({8})}, {"b", at::zeros({8})}};
  WeightReceiver receiver(tensors);
  auto messages = messages_of(BucketStream(*both.store, {.dtype = {}, .bucket_bytes = 32}));
  ASSERT_EQ(messages.size(), 4u);
  // A sender that leaves out "b" and counts right all the same.
  BucketStream one(*both.store, {.dtype = {}, .bucket_bytes = 32, .version = 1});
  StreamHeader header = one.header();
  header.buckets = 1;
  messages = {begin_message(header)};
  const auto bucket = one.next();
  messages.push_back(bucket_message_head(header, *bucket));
  messages.back().append(reinterpret_cast<const char*>(bucket->bytes.data()), bucket->bytes.size());
  messages.push_back(end_message(header, 0));
  EXPECT_SAYS(error_of([&] { take(receiver, messages); }), "ended without tensor 'b', which it announced");
  EXPECT_FALSE(receiver.version());
}

// tests/data/sync holds a stream as this sender makes it, and its tensors as ATen casts them: the test of the
// Python receiver starts from there.  TITANIUM_WRITE_DATA=1 writes the files anew.
TEST(Receive, TheStreamThatPythonIsTestedWith) {
  const fs::path data = fs::path(TITANIUM_SOURCE_DIR) / "tests/data/sync";
  testing::StoreOf run({{"model.embed_tokens.weight", {48, 96}},
                        {"model.layers.0.mlp.gate.weight", {8, 31}},
                        {"model.layers.0.scale", {}},
                        {"model.none", {0, 3}},
                        {"model.norm.weight", {96}}});
  const auto messages = messages_of(BucketStream(*run.store, {.keep_fp32 = {"model.layers.0.mlp.gate.weight"},
                                                              .tied_head = true,
                                                              .bucket_bytes = 2000,
                                                              .version = 7}));
  std::vector<at::Tensor> cast;
  std::vector<TensorView> want;
  for (const auto& weight : run.table.weights()) {
    const bool wide = weight->name() == "model.layers.0.mlp.gate.weight";
    cast.push_back(run.param(weight->name()).to(wide ? at::kFloat : at::kBFloat16));
    want.push_back({weight->name(), wide ? Dtype::F32 : Dtype::BF16, weight->shape(),
                    static_cast<const std::byte*>(cast.back().const_data_ptr()), cast.back().nbytes()});
  }
  if (std::getenv("TITANIUM_WRITE_DATA") != nullptr) {
    fs::create_directories(data);
    for (size_t i = 0; i < messages.size(); ++i)
      write_file(data / fmt::format("message-{}.bin", i), messages[i]);
    write_safetensors(data / "want.safetensors", want);
  }
  for (size_t i = 0; i < messages.size(); ++i)
    EXPECT_EQ(messages[i], read_file(data / fmt::format("message-{}.bin", i))) << i;
  const SafetensorsFile file(data / "want.safetensors");
  std::map<std::string, at::Tensor> tensors;
  for (const TensorView& view : want) {
    tensors[view.name] = at::zeros(view.shape, at::TensorOptions().dtype(to_scalar_type(view.dtype)));
    const auto bytes = [](const TensorView& v) {
      return std::string(reinterpret_cast<const char*>(v.data), v.nbytes);
    };
    EXPECT_EQ(bytes(file.at(view.name)), bytes(view)) << view.name;
  }
  WeightReceiver receiver(tensors);
  EXPECT_EQ(take(receiver, messages)->version, 7);
  for (const TensorView& view : want) {
    EXPECT_EQ(bytes_of(tensors.at(view.name)),
              std::string_view(reinterpret_cast<const char*>(view.data), view.nbytes));
  }
}

// Any bytes: an error of the right kind, never a crash.
TEST(Receive, SurvivesAnyMessage) {
  Pair pair("llama3");
  const auto whole = pair.messages();
  uint64_t state = 1;
  const auto random = [&] {
    return state = state * 6364136223846793005u + 1442695040888963407u, state >> 33;
  };
  for (int round = 0; round < 3000; ++round) {
    std::string message = whole[random() % whole.size()];
    message.resize(std::min<size_t>(message.size(), 3000));
    for (uint64_t i = 0, n = random() % 4; i < n; ++i)
      message[random() % message.size()] = static_cast<char>(random());
    try {
      decode_stream_message(std::as_bytes(std::span(message)));
    } catch (const BadData&) {
    }
  }
  const auto says = [](const Metadata& metadata) {
    const std::string message = safetensors_header({}, metadata);
    return error_of([&] { decode_stream_message(std::as_bytes(std::span(message))); });
  };
  Metadata begin = {{"kind", "weights.begin"}, {"version", "1"}, {"index", "0"},
                    {"buckets", "1"},          {"bytes", "4"},   {"tensors", R"([["a","F32",[1]]])"}};
  EXPECT_EQ(says(begin), "nothing");
  const auto with = [&](const char* key, const char* value) {
    Metadata changed = begin;
    changed[key] = value;
    return says(changed);
  };
  EXPECT_SAYS(with("kind", "weights"), "kind 'weights' is none of");
  EXPECT_SAYS(with("version", "-1"), "not a number from 0 up");
  EXPECT_SAYS(with("version", "99999999999999999999"), "not a number from 0 up");
  EXPECT_SAYS(with("bytes", "5"), "'bytes' is 5, its tensors have 4");
  EXPECT_SAYS(with("tensors", R"([["a","F32",[1]],["a","F32",[1]]])"), "'a' is announced twice");
  EXPECT_SAYS(with("tensors", R"([["a","I32",[1]]])"), "expected [name");
  EXPECT_SAYS(with("tensors", R"([["a","F32",[-1]]])"), "with the size -1");
  EXPECT_SAYS(with("tensors", R"([["a","F32",[4611686018427387904,4]]])"), "overflows");
  EXPECT_SAYS(with("tensors", R"({})"), "is not a list");
  EXPECT_SAYS(with("tensors", "[["), "'tensors'");
  begin.erase("tensors");
  EXPECT_SAYS(says(begin), "has no 'tensors'");
}

}  // namespace
}  // namespace titanium
