#include "titanium/config/hf_config.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"

namespace titanium {
namespace {

Json base(const std::string& type = "llama") {
  Json json = Json::parse(R"({
    "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "max_position_embeddings": 512, "sliding_window": null, "rope_theta": 10000.0, "tie_word_embeddings": false})");
  json["model_type"] = type;
  return json;
}

Json with(Json json, const std::string& key, const Json& value) {
  json[key] = value;
  return json;
}

Json without(Json json, const std::string& key) {
  json.erase(key);
  return json;
}

HfConfig read(const Json& json) {
  return HfConfig::from_json(json, "config.json");
}

void expect_refused(const Json& json, const std::string& key, const std::string& words = "") {
  std::string message = "no error";
  try {
    read(json);
  } catch (const BadConfig& error) {
    message = error.what();
  }
  EXPECT_TRUE(message.starts_with("config.json: ")) << message;
  EXPECT_NE(message.find(key), std::string::npos) << message << "\nlacks: " << key;
  EXPECT_NE(message.find(words), std::string::npos) << message << "\nlacks: " << words;
}

using Ids = std::vector<int64_t>;

std::filesystem::path model(const std::string& name) {
  return std::filesystem::path(TITANIUM_SOURCE_DIR) / "tests/data/models" / name;
}

TEST(HfConfig, ReadsTheFixtures) {
  const HfConfig llama = HfConfig::from_folder(model("llama_headdim"));
  EXPECT_EQ(llama.head_dim, 24);
  EXPECT_EQ(llama.num_key_value_heads, 2);
  EXPECT_TRUE(llama.qkv_bias && llama.o_bias);
  EXPECT_FALSE(llama.mlp_bias || llama.qk_norm || llama.tie_word_embeddings);
  EXPECT_EQ(llama.rope.theta, 500000);
  EXPECT_EQ(llama.rms_norm_eps, 1e-4);
  EXPECT_EQ(llama.dtype, Dtype::F32);
  EXPECT_FALSE(llama.bos_token_id || llama.pad_token_id);
  EXPECT_TRUE(llama.eos_token_ids.empty());
  EXPECT_EQ(llama.architectures, std::vector<std::string>{"LlamaForCausalLM"});
  EXPECT_EQ(llama.window, (Ids{0, 0}));

  EXPECT_EQ(HfConfig::from_folder(model("llama3")).rope.type, RopeType::kLlama3);
  EXPECT_EQ(HfConfig::from_folder(model("llama3")).rope.original_max_position_embeddings, 64);
  EXPECT_TRUE(HfConfig::from_folder(model("llama_tied")).tie_word_embeddings);
  EXPECT_EQ(HfConfig::from_folder(model("llama_bf16")).dtype, Dtype::BF16);
  EXPECT_EQ(HfConfig::from_folder(model("mistral_swa")).window, (Ids{6, 6}));

  const HfConfig qwen2 = HfConfig::from_folder(model("qwen2"));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.o_bias || qwen2.qk_norm);
  EXPECT_EQ(qwen2.head_dim, 16);
  EXPECT_EQ(qwen2.window, (Ids{0, 0}));

  const HfConfig qwen3 = HfConfig::from_folder(model("qwen3_tied"));
  EXPECT_TRUE(qwen3.qk_norm && qwen3.tie_word_embeddings);
  EXPECT_FALSE(qwen3.qkv_bias || qwen3.o_bias);
  EXPECT_EQ(qwen3.head_dim, 32);
}

// Every key comes back, head_dim and keys unknown here included.
TEST(HfConfig, ExportKeepsTheFile) {
  for (const char* name : {"llama3", "llama_headdim", "mistral_swa", "qwen2", "qwen3_tied"}) {
    EXPECT_EQ(HfConfig::from_folder(model(name)).to_json(), read_json(model(name) / "config.json")) << name;
  }
  const Json odd = with(base(), "my_own_key", {1, 2});
  EXPECT_EQ(read(odd).to_json(), odd);
  EXPECT_EQ(read(odd).to_json()["head_dim"], 32);

  EXPECT_EQ(read(with(base(), "dtype", "float32")).to_json(Dtype::BF16), with(base(), "dtype", "bfloat16"));
  EXPECT_EQ(read(with(base(), "torch_dtype", "float32")).to_json(Dtype::BF16),
            with(base(), "torch_dtype", "bfloat16"));
  EXPECT_EQ(read(base()).to_json(Dtype::F32), with(base(), "torch_dtype", "float32"));
}

TEST(HfConfig, HeadDim) {
  EXPECT_EQ(read(base()).head_dim, 32);  // not 64 / 4
  EXPECT_EQ(read(without(base(), "head_dim")).head_dim, 16);
  EXPECT_EQ(read(with(base(), "head_dim", nullptr)).head_dim, 16);
  EXPECT_EQ(read(without(base("qwen2"), "head_dim")).head_dim, 16);
  EXPECT_EQ(read(without(base("qwen3"), "head_dim")).head_dim, 128);  // Qwen3Config's default
  EXPECT_EQ(read(with(base("qwen3"), "head_dim", nullptr)).head_dim, 16);
  expect_refused(with(base(), "head_dim", 7), "head_dim = 7", "even");
  expect_refused(with(without(base(), "head_dim"), "num_attention_heads", 6), "head_dim is missing");
  EXPECT_EQ(read(with(base(), "num_attention_heads", 6)).head_dim, 32);
}

TEST(HfConfig, KeyValueHeads) {
  EXPECT_EQ(read(without(base(), "num_key_value_heads")).num_key_value_heads, 4);
  EXPECT_EQ(read(with(base(), "num_key_value_heads", nullptr)).num_key_value_heads, 4);
  expect_refused(with(base(), "num_key_value_heads", 3), "num_key_value_heads = 3", "divisor");
}

TEST(HfConfig, Biases) {
  const HfConfig llama = read(with(with(base(), "attention_bias", true), "mlp_bias", true));
  EXPECT_TRUE(llama.qkv_bias && llama.o_bias && llama.mlp_bias);
  const HfConfig qwen2 = read(with(base("qwen2"), "attention_bias", false));
  EXPECT_TRUE(qwen2.qkv_bias);
  EXPECT_FALSE(qwen2.o_bias || qwen2.mlp_bias);
  const HfConfig qwen3 = read(with(base("qwen3"), "attention_bias", true));
  EXPECT_TRUE(qwen3.qkv_bias && qwen3.o_bias && qwen3.qk_norm);
  const HfConfig mistral = read(base("mistral"));
  EXPECT_FALSE(mistral.qkv_bias || mistral.o_bias || mistral.mlp_bias || mistral.qk_norm);
}

TEST(HfConfig, Windows) {
  EXPECT_EQ(read(with(base("mistral"), "sliding_window", 8)).window, (Ids{8, 8, 8}));
  EXPECT_EQ(read(base("mistral")).window, (Ids{0, 0, 0}));
  EXPECT_EQ(read(without(base("mistral"), "sliding_window")).window, (Ids{4096, 4096, 4096}));
  EXPECT_EQ(read(base("llama")).window, (Ids{0, 0, 0}));
  for (const char* type : {"qwen2", "qwen3"}) {
    Json json = with(with(base(type), "sliding_window", 8), "max_window_layers", 1);
    EXPECT_EQ(read(json).window, (Ids{0, 0, 0}));  // use_sliding_window is false by default
    json["use_sliding_window"] = true;
    EXPECT_EQ(read(json).window, (Ids{0, 8, 8}));
    EXPECT_EQ(read(without(json, "max_window_layers")).window, (Ids{0, 0, 0}));  // 28 by default
    json["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention"};
    EXPECT_EQ(read(json).window, (Ids{8, 0, 8}));
    expect_refused(with(json, "use_sliding_window", false), "layer_types", "layer 0 disagrees");
    expect_refused(with(json, "sliding_window", nullptr), "layer_types", "layer 0 disagrees");
    expect_refused(with(json, "layer_types", {"full_attention"}), "layer_types", "num_hidden_layers = 3");
    expect_refused(with(json, "layer_types", {"full_attention", "full_attention", "linear_attention"}),
                   "layer_types", "linear_attention");
  }
  expect_refused(with(base("llama"), "sliding_window", 8), "sliding_window = 8");
  expect_refused(with(base("mistral"), "sliding_window", 0), "sliding_window = 0");
  expect_refused(with(with(base("mistral"), "sliding_window", 8), "layer_types",
                      {"full_attention", "full_attention", "full_attention"}),
                 "layer_types");
}

TEST(HfConfig, TokenIds) {
  EXPECT_EQ(read(base()).bos_token_id, 1);  // LlamaConfig's defaults
  EXPECT_EQ(read(base()).eos_token_ids, (Ids{2}));
  EXPECT_TRUE(read(base("qwen2")).eos_token_ids.empty());
  EXPECT_FALSE(read(with(base(), "bos_token_id", nullptr)).bos_token_id);
  EXPECT_EQ(read(with(base(), "eos_token_id", {5, 7})).eos_token_ids, (Ids{5, 7}));
  EXPECT_EQ(read(with(base(), "pad_token_id", 3)).pad_token_id, 3);
  EXPECT_FALSE(read(with(base(), "pad_token_id", -1)).pad_token_id);
  expect_refused(with(base(), "eos_token_id", "x"), "eos_token_id");
  expect_refused(with(base(), "eos_token_id", {1, -2}), "eos_token_id");
  const int64_t vocab = base().at("vocab_size");
  EXPECT_EQ(read(with(base(), "eos_token_id", vocab - 1)).eos_token_ids, (Ids{vocab - 1}));
  for (const Json& beyond : {Json(vocab), Json::array({5, vocab})})
    expect_refused(with(base(), "eos_token_id", beyond), "eos_token_id",
                   "below vocab_size = " + std::to_string(vocab));
}

TEST(HfConfig, Dtype) {
  EXPECT_FALSE(read(base()).dtype);
  EXPECT_EQ(read(with(base(), "torch_dtype", "float16")).dtype, Dtype::F16);
  EXPECT_EQ(read(with(with(base(), "torch_dtype", "float16"), "dtype", "bfloat16")).dtype, Dtype::BF16);
  expect_refused(with(base(), "dtype", "float8_e4m3fn"), "dtype", "float8_e4m3fn");
  expect_refused(with(base(), "torch_dtype", "int64"), "torch_dtype");
}

TEST(HfConfig, RefusesWhatWouldChangeTheResult) {
  expect_refused(with(base(), "model_type", "gpt2"), "model_type = \"gpt2\"", "llama, mistral, qwen2, qwen3");
  expect_refused(with(base(), "architectures", {"LlamaForSequenceClassification"}), "architectures",
                 "LlamaForCausalLM");
  expect_refused(with(base(), "architectures", {"MistralForCausalLM"}), "architectures");
  expect_refused(with(base(), "hidden_act", "gelu"), "hidden_act = \"gelu\"", "silu");
  expect_refused(with(base(), "quantization_config", {{"bits", 4}}), "quantization_config");
  expect_refused(with(base(), "attention_dropout", 0.1), "attention_dropout = 0.1");
  expect_refused(with(base(), "pretraining_tp", 2), "pretraining_tp = 2");
  expect_refused(with(base(), "is_encoder_decoder", true), "is_encoder_decoder");
  expect_refused(with(base(), "add_cross_attention", true), "add_cross_attention");
  expect_refused(with(base(), "partial_rotary_factor", 0.5), "partial_rotary_factor = 0.5");
  const Json off = Json::parse(R"({"attention_dropout": 0.0, "pretraining_tp": 1, "is_encoder_decoder": false,
      "quantization_config": null, "partial_rotary_factor": 1.0, "add_cross_attention": false})");
  Json json = base();
  json.update(off);
  EXPECT_EQ(read(json).hidden_size, 64);
}

TEST(HfConfig, RefusesBadValues) {
  expect_refused(Json::array(), "not a JSON object");
  for (const char* key : {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
                          "num_attention_heads", "vocab_size", "rms_norm_eps", "max_position_embeddings"}) {
    expect_refused(without(base(), key), std::string(key) + " is missing");
    expect_refused(with(base(), key, Json::array({1})), key);
  }
  expect_refused(with(base(), "hidden_size", 0), "hidden_size = 0");
  expect_refused(with(base(), "hidden_size", 64.5), "hidden_size = 64.5");
  expect_refused(with(base(), "hidden_size", "64"), "hidden_size");
  expect_refused(with(base(), "vocab_size", 18446744073709551615u), "vocab_size");
  expect_refused(with(base(), "num_hidden_layers", 1000000000), "num_hidden_layers");
  expect_refused(with(base(), "rms_norm_eps", -1), "rms_norm_eps = -1");
  expect_refused(with(base(), "tie_word_embeddings", 1), "tie_word_embeddings = 1");
  EXPECT_THROW(HfConfig::from_folder("/nonexistent"), BadConfig);
}

TEST(HfConfig, FoldersThatAreNotThere) {
  const auto says = [](const std::string& folder) -> std::string {
    try {
      require_model_folder(folder);
    } catch (const BadConfig& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(says(model("llama3").string()), "");
  EXPECT_EQ(says(model("llama3").string() + "/"), "");
  EXPECT_EQ(says((model("llama3") / "config.json").string()),
            (model("llama3") / "config.json").string() + ": is not a folder");
  for (const char* name :
       {"nosuch", "/nosuch/model", "./nosuch", "../nosuch", "~/nosuch", "nosuch/", "a/b/c"})
    EXPECT_EQ(says(name), std::string(name) + ": there is no such folder");
  EXPECT_NE(says("org-nosuch/name-1").find("`hf download org-nosuch/name-1 --local-dir name-1`"),
            std::string::npos)
      << says("org-nosuch/name-1");
}

TEST(HfConfig, RefusesRopeSettings) {
  const auto scaling = [](const Json& value) { return with(base(), "rope_scaling", value); };
  expect_refused(scaling({{"rope_type", "dynamic"}, {"factor", 2}}), "rope_scaling.rope_type = \"dynamic\"",
                 "yarn");
  expect_refused(scaling({{"type", "su"}}), "rope_scaling.type = \"su\"");
  expect_refused(scaling({{"type", "linear"}, {"rope_type", "yarn"}, {"factor", 2}}), "rope_scaling.type",
                 "disagrees");
  expect_refused(scaling({{"type", "linear"}}), "rope_scaling.factor is missing");
  expect_refused(scaling({{"type", "linear"}, {"factor", -2}}), "rope_scaling.factor = -2");
  expect_refused(scaling({{"type", "yarn"}}), "rope_scaling.factor is missing");
  expect_refused(scaling({{"type", "linear"}, {"factor", 2}, {"mrope_section", {1, 2}}}),
                 "rope_scaling.mrope_section");
  expect_refused(scaling({{"type", "linear"}, {"factor", 2}, {"partial_rotary_factor", 0.5}}),
                 "partial_rotary_factor");
  expect_refused(scaling({{"type", "linear"}, {"factor", 2}, {"rope_theta", 5000}}),
                 "rope_scaling.rope_theta", "disagrees");
  expect_refused(
      scaling({{"rope_type", "llama3"}, {"factor", 8}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}),
      "high_freq_factor");
  expect_refused(scaling("linear"), "rope_scaling");
  expect_refused(with(base("qwen3"), "rope_parameters", {{"full_attention", {{"rope_theta", 10000}}}}),
                 "rope_parameters.full_attention", "each layer type");
  expect_refused(
      with(scaling({{"type", "linear"}, {"factor", 2}}), "rope_parameters", {{"rope_type", "default"}}),
      "rope_parameters", "disagrees");
  expect_refused(with(base(), "rope_theta", 0), "rope_theta = 0");

  EXPECT_EQ(read(without(base(), "rope_theta")).rope.theta, 10000);
  EXPECT_EQ(read(scaling({{"type", "yarn"}, {"factor", 2}, {"finetuned", true}}))
                .rope.original_max_position_embeddings,
            512);
  const Json both = with(scaling({{"type", "linear"}, {"factor", 2}}), "rope_parameters",
                         {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 10000}});
  EXPECT_EQ(read(both).rope.factor, 2);
}

TEST(ModelName, KnownSizesHaveTorchtitansFlavor) {
  Json json = base();
  json.update(Json::parse(R"({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
      "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256})"));
  ModelName name = derive_model_name_and_flavor(read(json));
  EXPECT_EQ(name.name, "llama3");
  EXPECT_EQ(name.flavor, "8B");
  EXPECT_EQ(name.hf_model_type, "llama");
  EXPECT_EQ(derive_model_name_and_flavor(read(with(json, "vocab_size", 32000))).flavor, "32L4096D");
  EXPECT_EQ(derive_model_name_and_flavor(read(with(json, "intermediate_size", 11008))).flavor, "32L4096D");

  json = base("qwen3");
  json.update(Json::parse(R"({"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
      "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936})"));
  name = derive_model_name_and_flavor(read(json));
  EXPECT_EQ(name.name, "qwen3");
  EXPECT_EQ(name.flavor, "0.6B");

  name = derive_model_name_and_flavor(HfConfig::from_folder(model("mistral_swa")));
  EXPECT_EQ(name.name, "llama3");
  EXPECT_EQ(name.hf_model_type, "mistral");
  EXPECT_EQ(name.flavor, "2L64D");
  name = derive_model_name_and_flavor(HfConfig::from_folder(model("qwen2")));
  EXPECT_EQ(name.name, "qwen3");
  EXPECT_EQ(name.hf_model_type, "qwen2");
}

}  // namespace
}  // namespace titanium
