#include "titanium/formats/gguf_config.h"

#include <array>
#include <cmath>
#include <numbers>
#include <set>

#include "titanium/base/error.h"

namespace titanium {
namespace {

struct Architecture {
  const char* gguf;        // general.architecture, and the prefix of its keys
  const char* class_name;  // "architectures" of config.json; model_type is the same word as `gguf`
  bool interleaved_rope;   // q and k rows are permuted in the file
  bool qkv_bias;           // always there; otherwise a bias on q, k, v and o may be
  bool qk_norm;
};

// What a config.json may say (titanium/config/hf_config.cpp).
constexpr int64_t kMostLayers = 1 << 14, kMostWidth = 1 << 20, kMostHidden = 1 << 24, kMostHeads = 1 << 14;
constexpr int64_t kMostVocab = 1 << 28, kMostPositions = int64_t{1} << 40;

constexpr std::array<Architecture, 3> kArchitectures = {{
    {"llama", "LlamaForCausalLM", true, false, false},
    {"qwen2", "Qwen2ForCausalLM", false, true, false},
    {"qwen3", "Qwen3ForCausalLM", false, false, true},
}};

// Keys "<architecture>.<key>" that are read below, or say nothing about the numbers of the model.
constexpr std::array kKnownKeys = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "expert_count",
    "expert_used_count",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
    "tensor_data_layout",
};

class Describer {
 public:
  explicit Describer(const GgufFile& file) : file_(file), arch_(architecture(file)) {}

  GgufModel describe() {
    refuse_unknown_keys();
    read_sizes();
    read_tensors();
    write_config();
    return std::move(model_);
  }

 private:
  static const Architecture& architecture(const GgufFile& file) {
    const auto name = file.string("general.architecture");
    for (const Architecture& arch : kArchitectures) {
      if (name && *name == arch.gguf) return arch;
    }
    throw BadCheckpoint("{}: general.architecture is '{}' (allowed: llama, qwen2, qwen3)", file.source(),
                        name.value_or("absent"));
  }

  std::string key(std::string_view suffix) const { return fmt::format("{}.{}", arch_.gguf, suffix); }

  int64_t positive(std::string_view suffix, int64_t most,
                   std::optional<int64_t> fallback = std::nullopt) const {
    const auto value = file_.integer(key(suffix));
    if (!value && fallback) return *fallback;
    if (!value) throw BadCheckpoint("{}: has no key '{}'", file_.source(), key(suffix));
    if (*value <= 0 || *value > most) {
      throw BadCheckpoint("{}: key '{}' is {}, expected 1 to {}", file_.source(), key(suffix), *value, most);
    }
    return *value;
  }

  double finite(std::string_view suffix, std::optional<double> fallback = std::nullopt) const {
    const auto value = file_.number(key(suffix));
    if (!value && fallback) return *fallback;
    if (!value) throw BadCheckpoint("{}: has no key '{}'", file_.source(), key(suffix));
    if (!std::isfinite(*value) || *value <= 0) {
      throw BadCheckpoint("{}: key '{}' is {}, expected a positive number", file_.source(), key(suffix),
                          *value);
    }
    return *value;
  }

  void refuse_unknown_keys() const {
    const std::string prefix = key("");
    for (const auto& [name, value] : file_.metadata()) {
      if (!name.starts_with(prefix)) continue;
      const std::string_view suffix = std::string_view(name).substr(prefix.size());
      bool known = false;
      for (const char* candidate : kKnownKeys) known |= suffix == candidate;
      if (!known) throw BadCheckpoint("{}: key '{}' is not supported", file_.source(), name);
    }
    if (file_.integer(key("expert_count")).value_or(0) != 0) {
      throw BadCheckpoint("{}: key '{}' is not 0: mixtures of experts are not supported", file_.source(),
                          key("expert_count"));
    }
    if (!file_.boolean(key("attention.causal")).value_or(true)) {
      throw BadCheckpoint("{}: key '{}' is false: only causal models are supported", file_.source(),
                          key("attention.causal"));
    }
    if (file_.integer("split.count").value_or(1) > 1) {
      throw BadCheckpoint("{}: is one of {} parts (split.count); merge the parts into one file first",
                          file_.source(), *file_.integer("split.count"));
    }
  }

  void read_sizes() {
    layers_ = positive("block_count", kMostLayers);
    width_ = positive("embedding_length", kMostWidth);
    hidden_ = positive("feed_forward_length", kMostHidden);
    heads_ = positive("attention.head_count", kMostHeads);
    kv_heads_ = positive("attention.head_count_kv", kMostHeads, heads_);
    model_.context_length = positive("context_length", kMostPositions);
    if (heads_ % kv_heads_ != 0) {
      throw BadCheckpoint("{}: {} heads are not a multiple of {} key heads", file_.source(), heads_,
                          kv_heads_);
    }
    const auto key_length = file_.integer(key("attention.key_length"));
    if (!key_length && width_ % heads_ != 0) {
      throw BadCheckpoint("{}: width {} is not a multiple of {} heads, and there is no '{}'", file_.source(),
                          width_, heads_, key("attention.key_length"));
    }
    head_width_ = positive("attention.key_length", kMostWidth, std::max<int64_t>(width_ / heads_, 1));
    // Heads of other widths for values, and rope on a part of the head, are models that we do not have.
    for (const char* same : {"attention.value_length", "rope.dimension_count"}) {
      if (positive(same, kMostWidth, head_width_) != head_width_) {
        throw BadCheckpoint("{}: key '{}' is {}, only the head width {} is supported", file_.source(),
                            key(same), *file_.integer(key(same)), head_width_);
      }
    }
    if (head_width_ % 2 != 0) throw BadCheckpoint("{}: head width {} is odd", file_.source(), head_width_);
  }

  bool has(const std::string& name) const { return file_.find_tensor(name) != nullptr; }

  void move(const std::string& from, const std::string& to, const std::vector<int64_t>& shape,
            int64_t heads = 0) {
    const GgufTensor* tensor = file_.find_tensor(from);
    if (tensor == nullptr) throw BadCheckpoint("{}: has no tensor '{}'", file_.source(), from);
    if (tensor->shape != shape) {
      throw BadCheckpoint("{}: tensor '{}' has shape {}, its keys ask for {}", file_.source(), from,
                          Json(tensor->shape).dump(), Json(shape).dump());
    }
    used_.insert(from);
    model_.moves.push_back({tensor, to, heads});
  }

  void read_tensors() {
    const GgufTensor* embedding = file_.find_tensor("token_embd.weight");
    if (embedding == nullptr) throw BadCheckpoint("{}: has no tensor 'token_embd.weight'", file_.source());
    model_.vocab_size = embedding->rows();
    if (positive("vocab_size", kMostVocab, model_.vocab_size) != model_.vocab_size) {
      throw BadCheckpoint("{}: key '{}' is {}, but token_embd.weight has {} rows", file_.source(),
                          key("vocab_size"), *file_.integer(key("vocab_size")), model_.vocab_size);
    }
    move("token_embd.weight", "model.embed_tokens.weight", {model_.vocab_size, width_});
    // The first layer says whether the optional biases are there; the others must agree.
    out_bias_ = !arch_.qkv_bias && has("blk.0.attn_output.bias");
    qkv_bias_ = arch_.qkv_bias || out_bias_;
    mlp_bias_ = arch_.interleaved_rope && has("blk.0.ffn_down.bias");
    for (int64_t layer = 0; layer < layers_; ++layer) read_layer(layer);
    move("output_norm.weight", "model.norm.weight", {width_});
    tied_ = !has("output.weight");
    if (!tied_) move("output.weight", "lm_head.weight", {model_.vocab_size, width_});

    for (const GgufTensor& tensor : file_.tensors()) {
      if (tensor.name != "rope_freqs.weight" && !used_.count(tensor.name)) {
        throw BadCheckpoint("{}: tensor '{}' is not part of a supported {} model", file_.source(),
                            tensor.name, arch_.gguf);
      }
    }
  }

  void read_layer(int64_t layer) {
    const std::string from = fmt::format("blk.{}.", layer), to = fmt::format("model.layers.{}.", layer);
    const int64_t q = heads_ * head_width_, kv = kv_heads_ * head_width_;
    const bool permuted = arch_.interleaved_rope;
    const auto linear = [&](const std::string& a, const std::string& b, int64_t rows, int64_t columns,
                            bool bias, int64_t heads = 0) {
      move(from + a + ".weight", to + b + ".weight", {rows, columns}, heads);
      if (bias) move(from + a + ".bias", to + b + ".bias", {rows}, heads);
    };
    linear("attn_q", "self_attn.q_proj", q, width_, qkv_bias_, permuted ? heads_ : 0);
    linear("attn_k", "self_attn.k_proj", kv, width_, qkv_bias_, permuted ? kv_heads_ : 0);
    linear("attn_v", "self_attn.v_proj", kv, width_, qkv_bias_);
    linear("attn_output", "self_attn.o_proj", width_, q, out_bias_);
    if (arch_.qk_norm) {
      move(from + "attn_q_norm.weight", to + "self_attn.q_norm.weight", {head_width_});
      move(from + "attn_k_norm.weight", to + "self_attn.k_norm.weight", {head_width_});
    }
    linear("ffn_gate", "mlp.gate_proj", hidden_, width_, mlp_bias_);
    linear("ffn_up", "mlp.up_proj", hidden_, width_, mlp_bias_);
    linear("ffn_down", "mlp.down_proj", width_, hidden_, mlp_bias_);
    move(from + "attn_norm.weight", to + "input_layernorm.weight", {width_});
    move(from + "ffn_norm.weight", to + "post_attention_layernorm.weight", {width_});
  }

  // rope.scaling.* of the file, or the table of divisors that Llama 3.1 and later carry as a tensor.
  Json rope_scaling(double theta) const {
    const auto type = file_.string(key("rope.scaling.type"));
    const bool table = has("rope_freqs.weight");
    if (table && type && *type != "none") {
      throw BadCheckpoint("{}: has both '{}' and rope_freqs.weight", file_.source(),
                          key("rope.scaling.type"));
    }
    if (table) return llama3_scaling(theta);
    const double legacy = finite("rope.scale_linear", 1.0);
    const double factor = finite("rope.scaling.factor", legacy);
    if (!type || *type == "none" || (*type == "linear" && factor == 1)) {
      if (factor == 1 || (type && *type == "none")) return nullptr;
      return {{"rope_type", "linear"}, {"factor", factor}};
    }
    if (*type == "linear") return {{"rope_type", "linear"}, {"factor", factor}};
    if (*type != "yarn") {
      throw BadCheckpoint("{}: key '{}' is '{}' (allowed: none, linear, yarn)", file_.source(),
                          key("rope.scaling.type"), *type);
    }
    for (const char* neutral : {"attn_factor", "yarn_ext_factor", "yarn_attn_factor"}) {
      const auto name = key(fmt::format("rope.scaling.{}", neutral));
      if (file_.number(name).value_or(1) != 1) {
        throw BadCheckpoint("{}: key '{}' is {}, only 1 is supported", file_.source(), name,
                            *file_.number(name));
      }
    }
    if (file_.number(key("rope.scaling.yarn_log_multiplier")).value_or(0) != 0) {
      throw BadCheckpoint("{}: key '{}' is not supported", file_.source(),
                          key("rope.scaling.yarn_log_multiplier"));
    }
    Json scaling = {{"rope_type", "yarn"},
                    {"factor", factor},
                    {"original_max_position_embeddings",
                     positive("rope.scaling.original_context_length", kMostPositions)}};
    for (const char* beta : {"beta_fast", "beta_slow"}) {
      const auto name = fmt::format("rope.scaling.yarn_{}", beta);
      if (file_.number(key(name))) scaling[beta] = finite(name);
    }
    return scaling;
  }

  // The tensor holds, per pair of a head, what its frequency is divided by.  All published models use the
  // same bounds and differ in the factor, which is the largest divisor; the formula must then give the whole
  // table. (transformers/modeling_rope_utils.py, _compute_llama3_parameters)
  Json llama3_scaling(double theta) const {
    constexpr double kLow = 1, kHigh = 4, kOriginal = 8192;
    const GgufTensor& tensor = *file_.find_tensor("rope_freqs.weight");
    const int64_t pairs = head_width_ / 2;
    if (tensor.shape != std::vector<int64_t>{pairs}) {
      throw BadCheckpoint("{}: rope_freqs.weight has shape {}, expected [{}]", file_.source(),
                          Json(tensor.shape).dump(), pairs);
    }
    std::vector<float> divisors(static_cast<size_t>(pairs));
    tensor.dequantize(0, 1, divisors.data());
    const double factor = divisors.back();
    bool plain = true, fits = std::isfinite(factor) && factor > 1;
    for (int64_t i = 0; i < pairs; ++i) {
      const double wavelength = 2 * std::numbers::pi * std::pow(theta, 2.0 * double(i) / double(head_width_));
      const double smooth = (kOriginal / wavelength - kLow) / (kHigh - kLow);
      const double expected = wavelength < kOriginal / kHigh  ? 1
                              : wavelength > kOriginal / kLow ? factor
                                                              : 1 / ((1 - smooth) / factor + smooth);
      const double given = divisors[static_cast<size_t>(i)];
      plain &= given == 1;
      fits &= std::abs(given - expected) <= 1e-4 * expected;
    }
    if (plain) return nullptr;
    if (!fits) {
      throw BadCheckpoint(
          "{}: rope_freqs.weight is not Llama 3's scaling with bounds 1, 4 and 8192; no other is "
          "supported",
          file_.source());
    }
    return {{"rope_type", "llama3"},
            {"factor", factor},
            {"low_freq_factor", kLow},
            {"high_freq_factor", kHigh},
            {"original_max_position_embeddings", int64_t(kOriginal)}};
  }

  Json token_id(const char* name) const {
    const auto id = file_.integer(fmt::format("tokenizer.ggml.{}_token_id", name));
    if (!id) return nullptr;
    if (*id < 0 || *id >= model_.vocab_size) {
      throw BadCheckpoint("{}: key 'tokenizer.ggml.{}_token_id' is {}, the vocabulary has {}", file_.source(),
                          name, *id, model_.vocab_size);
    }
    return *id;
  }

  void write_config() {
    const double theta = finite("rope.freq_base", 10000.0);
    const Json bos = token_id("bos"), eos = token_id("eos"), pad = token_id("padding");
    model_.config = {
        {"architectures", {arch_.class_name}},
        {"attention_dropout", 0.0},
        {"bos_token_id", bos},
        {"eos_token_id", eos},
        {"head_dim", head_width_},
        {"hidden_act", "silu"},
        {"hidden_size", width_},
        {"initializer_range", 0.02},
        {"intermediate_size", hidden_},
        {"max_position_embeddings", model_.context_length},
        {"model_type", arch_.gguf},
        {"num_attention_heads", heads_},
        {"num_hidden_layers", layers_},
        {"num_key_value_heads", kv_heads_},
        {"pad_token_id", pad},
        {"rms_norm_eps", finite("attention.layer_norm_rms_epsilon")},
        {"rope_scaling", rope_scaling(theta)},
        {"rope_theta", theta},
        {"tie_word_embeddings", tied_},
        {"use_cache", true},
        {"vocab_size", model_.vocab_size},
    };
    if (!arch_.qkv_bias) model_.config["attention_bias"] = qkv_bias_;
    if (arch_.interleaved_rope) {
      model_.config["mlp_bias"] = mlp_bias_;
    } else {
      model_.config["use_sliding_window"] = false;
    }

    // An answer also ends where a turn does, if that is another token.
    Json ends = eos;
    const Json turn = token_id("eot");
    if (!turn.is_null() && turn != eos) ends = eos.is_null() ? turn : Json::array({eos, turn});
    model_.generation_config = {{"bos_token_id", bos}, {"eos_token_id", ends}, {"pad_token_id", pad}};
    for (auto at = model_.generation_config.begin(); at != model_.generation_config.end();) {
      at = at->is_null() ? model_.generation_config.erase(at) : std::next(at);
    }
  }

  const GgufFile& file_;
  const Architecture& arch_;
  GgufModel model_;
  std::set<std::string> used_;
  int64_t layers_ = 0, width_ = 0, hidden_ = 0, heads_ = 0, kv_heads_ = 0, head_width_ = 0;
  bool qkv_bias_ = false, out_bias_ = false, mlp_bias_ = false, tied_ = false;
};

}  // namespace

GgufModel describe_gguf(const GgufFile& file) {
  return Describer(file).describe();
}

}  // namespace titanium
