#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "titanium/formats/test_util.h"
#include "titanium/weights/hf_export.h"
#include "titanium/weights/hf_load.h"
#include "titanium/weights/test_store.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::is_tied;
using testing::kModels;
using testing::ModelStore;
using testing::put;
using testing::TempFolder;

bool same(const TensorView& a, const TensorView& b) {
  return a.dtype == b.dtype && a.shape == b.shape && std::memcmp(a.data, b.data, a.nbytes) == 0;
}

// A folder with the given tensors in one file.
void write_model(const fs::path& folder, const std::vector<TensorView>& tensors) {
  fs::create_directories(folder);
  fs::remove(folder / "model.safetensors");
  write_safetensors(folder / "model.safetensors", tensors, {{"format", "pt"}});
}

std::vector<TensorView> tensors_of(const HfTensors& tensors) {
  std::vector<TensorView> all;
  for (const std::string& name : tensors.names()) all.push_back(tensors.at(name));
  return all;
}

TEST(LoadHf, ExportInTheSameDtypeIsBitIdentical) {
  for (const char* model : {"llama3", "llama_bf16", "llama_headdim", "llama_tied", "mistral_swa", "qwen2",
                            "qwen3", "qwen3_tied"}) {
    SCOPED_TRACE(model);
    const HfTensors tensors(kModels / model);
    for (at::ScalarType master : {at::kFloat, at::kDouble}) {
      ModelStore run(tensors, is_tied(kModels / model), master);
      const HfLoadReport report = load_hf(tensors, *run.store);
      EXPECT_EQ(report.bytes, tensors.total_bytes());
      EXPECT_EQ(report.tensors, static_cast<int64_t>(tensors.size()));
      ASSERT_EQ(report.stored.size(), 1u);
      const TempFolder folder;
      export_hf(*run.store, read_json(kModels / model / "config.json"), folder / "out",
                {.dtype = report.stored[0]});
      const HfTensors exported(folder / "out");
      EXPECT_EQ(exported.names(), tensors.names());
      for (const std::string& name : tensors.names())
        EXPECT_TRUE(same(exported.at(name), tensors.at(name))) << name;
    }
  }
}

// A01.
TEST(ExportHf, ShardsHaveAnIndexThatIsTrue) {
  const HfTensors tensors(kModels / "qwen2");
  EXPECT_GT(tensors.files().size(), 1u);
  ModelStore run(tensors, false);
  load_hf(tensors, *run.store);
  const TempFolder folder;
  export_hf(*run.store, read_json(kModels / "qwen2/config.json"), folder / "out",
            {.max_shard_bytes = 250000});
  const Json index = read_json(folder / "out/model.safetensors.index.json");
  uint64_t total = 0;
  size_t named = 0, shards = 0;
  for (const auto& entry : fs::directory_iterator(folder / "out")) {
    if (entry.path().extension() != ".safetensors") continue;
    ++shards;
    const SafetensorsFile file(entry.path());
    for (const TensorView& tensor : file.tensors()) {
      EXPECT_EQ(index["weight_map"].at(tensor.name), entry.path().filename().string());
      total += tensor.nbytes;
      ++named;
    }
  }
  EXPECT_EQ(shards, 2u);
  EXPECT_EQ(index["weight_map"].size(), named);
  EXPECT_EQ(index["metadata"]["total_size"], total);
  const HfTensors exported(folder / "out");
  EXPECT_EQ(exported.names(), tensors.names());
  for (const std::string& name : tensors.names())
    EXPECT_TRUE(same(exported.at(name), tensors.at(name))) << name;
}

TEST(LoadHf, ConvertsToTheMastersDtype) {
  const HfTensors tensors(kModels / "llama_bf16");
  for (at::ScalarType master : {at::kFloat, at::kBFloat16, at::kDouble}) {
    ModelStore run(tensors, false, master);
    load_hf(tensors, *run.store);
    for (const std::string& name : tensors.names()) {
      const TensorView& view = tensors.at(name);
      at::Tensor want = at::empty({view.count()}, at::kBFloat16);
      std::memcpy(want.data_ptr(), view.data, view.nbytes);
      EXPECT_TRUE(at::equal(run.param(name), want.to(master))) << name;
    }
  }
  ModelStore narrow(HfTensors(kModels / "llama3"), false, at::kBFloat16);
  load_hf(kModels / "llama3", *narrow.store);
  ModelStore wide(HfTensors(kModels / "llama3"), false);
  load_hf(kModels / "llama3", *wide.store);
  EXPECT_TRUE(at::equal(narrow.param("lm_head.weight"), wide.param("lm_head.weight").to(at::kBFloat16)));
}

TEST(LoadHf, AnnouncesItsWrites) {
  const HfTensors tensors(kModels / "llama_tied");
  ModelStore run(tensors, true);
  std::vector<std::string> told;
  run.store->set_write_hook([&](Unit& unit) { told.push_back(unit.name()); });
  load_hf(tensors, *run.store);
  EXPECT_EQ(told.size(), run.store->units().size());
}

// A02.
TEST(LoadHf, TiedModelsMayHoldEitherNameOrBoth) {
  const HfTensors tensors(kModels / "llama_tied");
  const TempFolder folder;
  const TensorView embed = tensors.at("model.embed_tokens.weight");
  TensorView head = embed;
  head.name = "lm_head.weight";
  std::vector<std::byte> other(embed.data, embed.data + embed.nbytes);
  other[5] ^= std::byte{1};
  TensorView different = head;
  different.data = other.data();
  std::vector<TensorView> rest = tensors_of(tensors);
  std::erase_if(rest, [](const TensorView& t) { return t.name == "model.embed_tokens.weight"; });

  const auto load = [&](std::vector<TensorView> extra, ModelStore& run) {
    extra.insert(extra.end(), rest.begin(), rest.end());
    write_model(folder / "m", extra);
    load_hf(folder / "m", *run.store);
  };
  for (const std::vector<TensorView>& extra : {std::vector<TensorView>{head}, std::vector<TensorView>{embed},
                                               std::vector<TensorView>{embed, head}}) {
    ModelStore run(tensors, true);
    load(extra, run);
    EXPECT_EQ(std::memcmp(run.param("model.embed_tokens.weight").const_data_ptr(), embed.data, embed.nbytes),
              0);
    export_hf(*run.store, Json::object(), folder / "out", {.overwrite = true});
    EXPECT_EQ(HfTensors(folder / "out").names(), tensors.names());  // the head is left out
  }
  ModelStore run(tensors, true);
  EXPECT_SAYS(error_of([&] {
                load({embed, different}, run);
              }),
              "are one weight (tie_word_embeddings), but the files hold two");
  EXPECT_SAYS(error_of([&] { load({}, run); }),
              "tensor 'model.embed_tokens.weight' (or 'lm_head.weight') is missing");
  EXPECT_EQ(run.param("model.embed_tokens.weight").abs().sum().item<double>(), 0);
}

TEST(LoadHf, AnUntiedModelNeedsItsHead) {
  const HfTensors tensors(kModels / "llama3");
  std::vector<TensorView> all = tensors_of(tensors);
  std::erase_if(all, [](const TensorView& t) { return t.name == "lm_head.weight"; });
  const TempFolder folder;
  write_model(folder / "m", all);
  ModelStore run(tensors, false);
  EXPECT_SAYS(error_of([&] { load_hf(folder / "m", *run.store); }), "tensor 'lm_head.weight' is missing");
}

TEST(LoadHf, RefusesWithNamesAndShapesAndWritesNothing) {
  const HfTensors tensors(kModels / "qwen3");
  const TempFolder folder;
  const auto refused = [&](const std::function<void(std::vector<TensorView>&)>& change,
                           std::vector<std::string> parts) {
    std::vector<TensorView> all = tensors_of(tensors);
    change(all);
    write_model(folder / "m", all);
    ModelStore run(tensors, false);
    const std::string error = error_of([&] { load_hf(folder / "m", *run.store); });
    parts.insert(parts.end(), {"BadCheckpoint: ", "model.safetensors"});
    for (const std::string& part : parts) EXPECT_SAYS(error, part);
    for (const auto& unit : run.store->units())
      EXPECT_EQ(unit->shard().abs().sum().item<double>(), 0) << error;
  };
  const auto find = [](std::vector<TensorView>& all, const std::string& name) -> TensorView& {
    return *std::find_if(all.begin(), all.end(), [&](const TensorView& t) { return t.name == name; });
  };
  refused([](auto& all) { all.pop_back(); }, {"tensor 'model.norm.weight' is missing", "[64]"});
  refused([&](auto& all) { find(all, "model.norm.weight").name = "model.norm.weights"; },
          {"'model.norm.weight' is missing"});
  refused(
      [](auto& all) {
        all.push_back(all.back());
        all.back().name = "model.norm.bias";
      },
      {"tensor 'model.norm.bias' of shape [64] is unexpected"});
  refused(
      [&](auto& all) {
        find(all, "model.layers.1.mlp.down_proj.weight").shape = {112, 64};
      },
      {"tensor 'model.layers.1.mlp.down_proj.weight' has shape [112, 64]", "wants [64, 112]"});
  refused([&](auto& all) { find(all, "model.norm.weight").dtype = Dtype::I32; },
          {"tensor 'model.norm.weight' has dtype I32", "F32, BF16, F16, F64"});
}

TEST(LoadHf, IgnoresWhatIsKnownToBeHarmlessAndSaysSo) {
  const HfTensors tensors(kModels / "llama3");
  std::vector<TensorView> all = tensors_of(tensors);
  all.push_back(tensors.at("model.norm.weight"));
  all.back().name = "model.layers.0.self_attn.rotary_emb.inv_freq";
  const TempFolder folder;
  write_model(folder / "m", all);
  ModelStore run(tensors, false);
  const HfLoadReport report = load_hf(folder / "m", *run.store);
  EXPECT_EQ(report.ignored, (std::vector<std::string>{"model.layers.0.self_attn.rotary_emb.inv_freq"}));
  EXPECT_THROW(load_hf(folder / "m", *run.store, {.ignored_endings = {}}), BadCheckpoint);
}

TEST(ExportHf, WritesConfigAndTokenizerFiles) {
  const TempFolder folder;
  fs::create_directory(folder / "source");
  put(folder / "source/tokenizer.json", "{\"a\": 1}");
  put(folder / "source/chat_template.jinja", "{{ x }}");
  put(folder / "source/model.safetensors", "not copied");
  const HfTensors tensors(kModels / "llama_headdim");
  ModelStore run(tensors, false);
  load_hf(tensors, *run.store);
  Json config = read_json(kModels / "llama_headdim/config.json");
  export_hf(*run.store, config, folder / "out/", {.dtype = Dtype::BF16, .tokenizer_from = folder / "source"});
  EXPECT_EQ(read_file(folder / "out/tokenizer.json"), "{\"a\": 1}");
  EXPECT_EQ(read_file(folder / "out/chat_template.jinja"), "{{ x }}");
  Json written = read_json(folder / "out/config.json");
  EXPECT_EQ(written.at("head_dim"), config.at("head_dim"));  // A05
  const char* key = config.contains("dtype") ? "dtype" : "torch_dtype";
  EXPECT_EQ(written.at(key), "bfloat16");
  config.erase(key);
  written.erase(key);
  EXPECT_EQ(written, config);  // the rest as given
  EXPECT_EQ(HfTensors(folder / "out").at("model.norm.weight").dtype, Dtype::BF16);
}

TEST(ExportHf, WritesTheTemplateThatWasUsedAndTheOthers) {
  const TempFolder folder;
  fs::create_directories(folder / "source/additional_chat_templates");
  put(folder / "source/chat_template.jinja", "{{ x }}");
  put(folder / "source/chat_template.json", "{}");
  put(folder / "source/additional_chat_templates/tool_use.jinja", "{{ tools }}");
  put(folder / "source/additional_chat_templates/notes.txt", "not copied");
  const HfTensors tensors(kModels / "llama3");
  ModelStore run(tensors, false);
  export_hf(*run.store, Json::object(), folder / "out",
            {.tokenizer_from = folder / "source", .chat_template = "{{ mine }}"});
  EXPECT_EQ(read_file(folder / "out/chat_template.jinja"), "{{ mine }}");
  EXPECT_FALSE(fs::exists(folder / "out/chat_template.json"));
  EXPECT_EQ(read_file(folder / "out/additional_chat_templates/tool_use.jinja"), "{{ tools }}");
  EXPECT_FALSE(fs::exists(folder / "out/additional_chat_templates/notes.txt"));
}

TEST(ExportHf, AnOwnerReplacesItsOwnExportsAlone) {
  const HfTensors tensors(kModels / "llama3");
  ModelStore run(tensors, false);
  const TempFolder folder;
  const HfExportOptions mine{.overwrite = true, .owner = "me"}, other{.overwrite = true, .owner = "you"};
  const auto refused = [&](const HfExportOptions& options, const std::string& why) {
    const std::string before = read_file(folder / "out/config.json");
    EXPECT_SAYS(error_of([&] { check_hf_export(folder / "out", options); }), why);
    EXPECT_SAYS(error_of([&] { export_hf(*run.store, {{"a", 9}}, folder / "out", options); }), why);
    EXPECT_EQ(read_file(folder / "out/config.json"), before);
  };
  export_hf(*run.store, {{"a", 1}}, folder / "out");
  refused(mine, "was not written by this run");
  fs::remove_all(folder / "out");
  check_hf_export(folder / "out", mine);
  export_hf(*run.store, {{"a", 1}}, folder / "out", mine);
  export_hf(*run.store, {{"a", 2}}, folder / "out", mine);
  EXPECT_EQ(read_json(folder / "out/config.json").at("a"), 2);
  refused(other, "was written by another run");
  put(folder / "out/MINE.txt", "years of work");
  refused(mine, "holds 'MINE.txt', which the export did not write");
  fs::remove(folder / "out/MINE.txt");
  export_hf(*run.store, {{"a", 3}}, folder / "out", mine);
  put(folder / "out/titanium_export.json", "[1");
  refused(mine, "titanium_export.json");
}

TEST(ExportHf, WhatAKilledExportMovedAwayIsPutBack) {
  const HfTensors tensors(kModels / "llama3");
  ModelStore run(tensors, false);
  const TempFolder folder;
  const HfExportOptions mine{.overwrite = true, .owner = "me"};
  export_hf(*run.store, {{"a", 1}}, folder / "out", mine);
  fs::rename(folder / "out", folder / "out.replaced");  // a kill between the two renames
  EXPECT_ANY_THROW(export_hf(*run.store, {{"a", "\xff"}}, folder / "out", mine));
  EXPECT_EQ(read_json(folder / "out/config.json").at("a"), 1);
  fs::rename(folder / "out", folder / "out.replaced");
  export_hf(*run.store, {{"a", 2}}, folder / "out", mine);
  EXPECT_EQ(read_json(folder / "out/config.json").at("a"), 2);
  EXPECT_EQ(folder.files(), 1u);
}

TEST(ExportHf, NeverDamagesWhatIsThere) {
  const HfTensors tensors(kModels / "llama3");
  ModelStore run(tensors, false);
  load_hf(tensors, *run.store);
  const TempFolder folder;
  export_hf(*run.store, Json::object(), folder / "out");
  EXPECT_SAYS(error_of([&] { export_hf(*run.store, Json::object(), folder / "out"); }), "exists already");
  // A failure after the weights were written: the older export is whole, and nothing lies about.
  const Json bad = {{"architectures", "\xff"}};
  EXPECT_ANY_THROW(export_hf(*run.store, bad, folder / "out", {.overwrite = true}));
  EXPECT_EQ(HfTensors(folder / "out").names(), tensors.names());
  EXPECT_EQ(folder.files(), 1u);
  run.param("model.norm.weight").fill_(3);
  export_hf(*run.store, Json::object(), folder / "out", {.overwrite = true});
  EXPECT_EQ(folder.files(), 1u);
  ModelStore again(tensors, false);
  load_hf(folder / "out", *again.store);
  EXPECT_EQ(again.param("model.norm.weight")[0].item<float>(), 3);
  fs::create_directory(folder / "mine");
  put(folder / "mine/thesis.txt", "years of work");
  EXPECT_SAYS(error_of([&] { export_hf(*run.store, Json::object(), folder / "mine", {.overwrite = true}); }),
              "is not a Hugging Face folder");
  fs::create_directory(folder / "empty");
  export_hf(*run.store, Json::object(), folder / "empty");
}

}  // namespace
}  // namespace titanium
