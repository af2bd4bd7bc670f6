#include "titanium/config/hf_config.h"

#include <algorithm>
#include <array>

#include "titanium/base/error.h"
#include "titanium/config/hf_reader.h"
#include "titanium/config/hf_rope.h"

namespace titanium {
namespace {

// Bounds that keep the size of every weight, and of all layers together, inside 64 bits.
constexpr int64_t kMostLayers = 1 << 14, kMostWidth = 1 << 20, kMostHeads = 1 << 14, kMostVocab = 1 << 28;
constexpr int64_t kMostHidden = 1 << 24;
constexpr int64_t kMostHeadDim = 1024;  // of the kernels (ops/rope.cpp)
constexpr int64_t kMostPositions = int64_t{1} << 40;

struct Family {
  const char* model_type;
  const char* architecture;
};
constexpr std::array kFamilies = {Family{"llama", "LlamaForCausalLM"},
                                  Family{"mistral", "MistralForCausalLM"},
                                  Family{"qwen2", "Qwen2ForCausalLM"}, Family{"qwen3", "Qwen3ForCausalLM"}};

// Keys that transformers honours and that would change the result here: refused unless they say "off".
void refuse_what_we_lack(const HfReader& in) {
  struct Refusal {
    const char* key;
    Json off;
    const char* why;
  };
  const std::vector<Refusal> table = {
      {"quantization_config", nullptr, "quantized weights are not supported"},
      {"is_encoder_decoder", false, "encoder-decoder models are not supported"},
      {"add_cross_attention", false, "cross attention is not supported"},
      {"is_causal", true, "attention that is not causal is not supported"},
      {"pretraining_tp", 1, "the sliced projections of pretraining_tp are not supported; allowed: 1"},
      {"attention_dropout", 0, "dropout is not supported; allowed: 0"},
  };
  for (const Refusal& refusal : table) {
    const Json* value = in.find(refusal.key);
    if (value != nullptr && *value != refusal.off) in.fail(refusal.key, refusal.why);
  }
}

const Family& read_family(const HfReader& in) {
  const std::string type = in.need_text("model_type");
  for (const Family& family : kFamilies) {
    if (type == family.model_type) return family;
  }
  in.fail("model_type", "supported: llama, mistral, qwen2, qwen3");
}

std::vector<std::string> read_architectures(const HfReader& in, const Family& family) {
  std::vector<std::string> out;
  const Json* list = in.find("architectures");
  if (list == nullptr) return out;
  const std::string why = fmt::format("supported for {}: [\"{}\"]", family.model_type, family.architecture);
  if (!list->is_array() || list->size() > 1) in.fail("architectures", why);
  for (const Json& entry : *list) {
    if (!entry.is_string() || entry.get<std::string>() != family.architecture) in.fail("architectures", why);
    out.push_back(family.architecture);
  }
  return out;
}

std::vector<int64_t> read_ids(const HfReader& in, const char* key, int64_t vocab_size) {
  std::vector<int64_t> out;
  const Json* value = in.find(key);
  if (value == nullptr) return out;
  const std::string why =
      fmt::format("allowed: a token id below vocab_size = {}, or a list of them", vocab_size);
  const auto add = [&](const Json& id) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size) in.fail(key, why);
    out.push_back(id.get<int64_t>());
  };
  if (value->is_array()) {
    for (const Json& id : *value) add(id);
  } else {
    add(*value);
  }
  return out;
}

std::optional<Dtype> read_dtype(const HfReader& in) {
  const char* key = in.find("dtype") != nullptr ? "dtype" : "torch_dtype";
  const std::optional<std::string> text = in.text(key);
  if (!text) return std::nullopt;
  const std::optional<Dtype> dtype = parse_dtype(*text);
  if (!dtype || !is_floating(*dtype)) in.fail(key, "supported: float32, bfloat16, float16, float64");
  return dtype;
}

std::optional<std::vector<bool>> read_layer_types(const HfReader& in, int64_t layers) {
  const Json* list = in.find("layer_types");
  if (list == nullptr) return std::nullopt;
  if (!list->is_array() || static_cast<int64_t>(list->size()) != layers) {
    in.fail("layer_types", fmt::format("allowed: a list of num_hidden_layers = {} entries", layers));
  }
  std::vector<bool> sliding;
  for (const Json& entry : *list) {
    if (entry != "full_attention" && entry != "sliding_attention") {
      in.fail("layer_types", "supported: full_attention, sliding_attention");
    }
    sliding.push_back(entry == "sliding_attention");
  }
  return sliding;
}

// Which layers slide, by each family's rule in transformers, and over how many keys.
std::vector<int64_t> read_windows(const HfReader& in, const std::string& type, int64_t layers) {
  constexpr int64_t kDefaultWindow = 4096,
                    kDefaultFirstLayer = 28;  // of transformers, where the key is absent
  const auto given = in.integer("sliding_window", 1, kMostPositions);
  const std::optional<std::vector<bool>> types = read_layer_types(in, layers);
  std::vector<int64_t> window(static_cast<size_t>(layers), 0);

  if (type == "llama") {
    if (given) in.fail("sliding_window", "a llama model attends to all keys; allowed: null");
  } else if (type == "mistral") {
    const int64_t size = in.has("sliding_window") ? given.value_or(0) : kDefaultWindow;
    std::fill(window.begin(), window.end(), size);
  } else if (in.boolean("use_sliding_window").value_or(false)) {
    const int64_t size = in.has("sliding_window") ? given.value_or(0) : kDefaultWindow;
    const int64_t first = in.integer("max_window_layers", 0, kMostLayers).value_or(kDefaultFirstLayer);
    for (int64_t i = 0; i < layers; ++i) {
      const bool slides = types ? (*types)[static_cast<size_t>(i)] : i >= first;
      if (slides) window[static_cast<size_t>(i)] = size;
    }
  }
  for (int64_t i = 0; types && i < layers; ++i) {
    const bool slides = window[static_cast<size_t>(i)] > 0;
    if ((*types)[static_cast<size_t>(i)] != slides) {
      in.fail("layer_types", fmt::format("layer {} disagrees with the sliding window settings", i));
    }
  }
  return window;
}

int64_t read_head_dim(const HfReader& in, const HfConfig& config) {
  constexpr int64_t kQwen3Default = 128;  // of transformers, where the key is absent
  const std::optional<int64_t> given = in.integer("head_dim", 2, kMostHeadDim);
  int64_t head_dim = 0;
  if (given) {
    head_dim = *given;
  } else if (config.model_type == "qwen3" && !in.has("head_dim")) {
    head_dim = kQwen3Default;
  } else {
    if (config.hidden_size % config.num_attention_heads != 0) {
      throw BadConfig(
          "{}: head_dim is missing, and hidden_size = {} is not a multiple of num_attention_heads = {}",
          in.source(), config.hidden_size, config.num_attention_heads);
    }
    head_dim = config.hidden_size / config.num_attention_heads;
  }
  if (head_dim % 2 != 0)
    throw BadConfig("{}: head_dim = {}: rope needs an even number", in.source(), head_dim);
  return head_dim;
}

void read_biases(const HfReader& in, HfConfig& config) {
  const std::string& type = config.model_type;
  if (type == "qwen2") {
    config.qkv_bias = true;
  } else if (type == "llama" || type == "qwen3") {
    config.qkv_bias = config.o_bias = in.boolean("attention_bias").value_or(false);
  }
  config.mlp_bias = type == "llama" && in.boolean("mlp_bias").value_or(false);
  config.qk_norm = type == "qwen3";
}

void read_special_tokens(const HfReader& in, HfConfig& config) {
  const bool llama_like = config.model_type == "llama" || config.model_type == "mistral";
  // transformers' ids for these families where the key is absent; null means none.
  constexpr int64_t kDefaultBos = 1, kDefaultEos = 2;
  config.bos_token_id = in.integer("bos_token_id", 0, kMostVocab);
  if (llama_like && !in.has("bos_token_id")) config.bos_token_id = kDefaultBos;
  config.eos_token_ids = read_ids(in, "eos_token_id", config.vocab_size);
  if (llama_like && !in.has("eos_token_id")) config.eos_token_ids = {kDefaultEos};
  config.pad_token_id = in.integer("pad_token_id", -1, kMostVocab);
  if (config.pad_token_id == -1) config.pad_token_id.reset();  // the first Llama files wrote "none" so
}

struct Flavor {
  const char* name;
  const char* flavor;
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, vocab;
};
// torchtitan 0.3.0's dense flavors of llama3 and qwen3.
constexpr std::array kFlavors = {
    Flavor{"llama3", "debugmodel", 6, 256, 768, 16, 16, 16, 2048},
    Flavor{"llama3", "1B", 16, 2048, 8192, 32, 8, 64, 128256},
    Flavor{"llama3", "3B", 28, 3072, 8192, 24, 8, 128, 128256},
    Flavor{"llama3", "8B", 32, 4096, 14336, 32, 8, 128, 128256},
    Flavor{"llama3", "70B", 80, 8192, 28672, 64, 8, 128, 128256},
    Flavor{"llama3", "405B", 126, 16384, 53248, 128, 8, 128, 128256},
    Flavor{"qwen3", "debugmodel", 8, 256, 3072, 16, 8, 128, 2048},
    Flavor{"qwen3", "0.6B", 28, 1024, 3072, 16, 8, 128, 151936},
    Flavor{"qwen3", "1.7B", 28, 2048, 6144, 16, 8, 128, 151936},
    Flavor{"qwen3", "4B", 36, 2560, 9728, 32, 8, 128, 151936},
    Flavor{"qwen3", "8B", 36, 4096, 12288, 32, 8, 128, 151936},
    Flavor{"qwen3", "14B", 40, 5120, 17408, 40, 8, 128, 151936},
    Flavor{"qwen3", "32B", 64, 5120, 25600, 64, 8, 128, 151936},
};

}  // namespace

HfConfig HfConfig::from_json(const Json& json, const std::string& source) {
  if (!json.is_object()) throw BadConfig("{}: not a JSON object", source);
  const HfReader in(json, source);
  const Family& family = read_family(in);
  HfConfig config;
  config.json_ = json;
  config.model_type = family.model_type;
  config.architectures = read_architectures(in, family);
  refuse_what_we_lack(in);

  config.hidden_size = in.need_integer("hidden_size", 1, kMostWidth);
  config.intermediate_size = in.need_integer("intermediate_size", 1, kMostHidden);
  config.num_hidden_layers = in.need_integer("num_hidden_layers", 1, kMostLayers);
  config.num_attention_heads = in.need_integer("num_attention_heads", 1, kMostHeads);
  config.num_key_value_heads =
      in.integer("num_key_value_heads", 1, kMostHeads).value_or(config.num_attention_heads);
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    in.fail("num_key_value_heads",
            fmt::format("allowed: a divisor of num_attention_heads = {}", config.num_attention_heads));
  }
  config.head_dim = read_head_dim(in, config);
  config.vocab_size = in.need_integer("vocab_size", 1, kMostVocab);
  config.max_position_embeddings = in.need_integer("max_position_embeddings", 1, kMostPositions);
  config.rms_norm_eps = in.need_positive("rms_norm_eps");
  config.hidden_act = in.text("hidden_act").value_or("silu");
  if (config.hidden_act != "silu") in.fail("hidden_act", "supported: silu");
  config.initializer_range = in.number("initializer_range").value_or(0.02);
  if (config.initializer_range < 0) in.fail("initializer_range", "allowed: a number >= 0");
  config.tie_word_embeddings = in.boolean("tie_word_embeddings").value_or(false);

  read_biases(in, config);
  config.rope = read_rope(json, source);
  config.window = read_windows(in, config.model_type, config.num_hidden_layers);
  read_special_tokens(in, config);
  config.dtype = read_dtype(in);
  return config;
}

void require_model_folder(const std::filesystem::path& folder) {
  std::error_code error;
  const auto type = std::filesystem::status(folder, error).type();
  if (type == std::filesystem::file_type::directory || type == std::filesystem::file_type::none) return;
  if (type != std::filesystem::file_type::not_found) throw BadConfig("{}: is not a folder", folder.string());
  const std::string name = folder.string();
  const std::filesystem::path parent = folder.parent_path();
  const bool hub_name = folder.is_relative() && folder.has_filename() && parent.has_filename() &&
                        !parent.has_parent_path() && name[0] != '.' && name[0] != '~' &&
                        !std::filesystem::exists(parent, error);
  if (!hub_name) throw BadConfig("{}: there is no such folder", name);
  throw BadConfig(
      "{}: there is no such folder; titanium reads local folders and downloads nothing: get a model of the "
      "Hugging Face Hub with `hf download {} --local-dir {}`, then give that folder",
      name, name, folder.filename().string());
}

HfConfig HfConfig::from_folder(const std::filesystem::path& folder) {
  require_model_folder(folder);
  const std::filesystem::path file = folder / "config.json";
  return from_json(read_json(file), file.string());
}

Json HfConfig::to_json(std::optional<Dtype> stored) const {
  Json json = json_;
  if (stored) {
    if (json.contains("dtype")) json["dtype"] = torch_name(*stored);
    if (json.contains("torch_dtype") || !json.contains("dtype")) json["torch_dtype"] = torch_name(*stored);
  }
  return json;
}

ModelName derive_model_name_and_flavor(const HfConfig& config) {
  ModelName out;
  out.hf_model_type = config.model_type;
  out.name = config.model_type == "llama" || config.model_type == "mistral" ? "llama3" : "qwen3";
  out.flavor = fmt::format("{}L{}D", config.num_hidden_layers, config.hidden_size);
  for (const Flavor& known : kFlavors) {
    if (out.name == known.name && config.num_hidden_layers == known.layers &&
        config.hidden_size == known.hidden && config.intermediate_size == known.intermediate &&
        config.num_attention_heads == known.heads && config.num_key_value_heads == known.kv_heads &&
        config.head_dim == known.head_dim && config.vocab_size == known.vocab) {
      out.flavor = known.flavor;
    }
  }
  return out;
}

}  // namespace titanium
