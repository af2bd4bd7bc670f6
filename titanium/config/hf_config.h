// A Hugging Face config.json of a dense decoder-only model: what the model needs, read, never assumed.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "titanium/config/rope.h"
#include "titanium/formats/dtype.h"
#include "titanium/formats/json.h"

namespace titanium {

// BadConfig where a model's folder is not there or no folder; of a name of the Hub it says how to get it.
void require_model_folder(const std::filesystem::path& folder);

struct HfConfig {
  std::string model_type;                  // "llama", "mistral", "qwen2", "qwen3"
  std::vector<std::string> architectures;  // ["LlamaForCausalLM"]; may be empty

  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;  // divides num_attention_heads
  int64_t head_dim = 0;             // even; need not be hidden_size / num_attention_heads
  int64_t vocab_size = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 0;
  std::string hidden_act;  // always "silu"
  double initializer_range = 0;
  bool tie_word_embeddings = false;

  bool qkv_bias = false;  // on q_proj, k_proj and v_proj
  bool o_bias = false;    // on o_proj: attention_bias of llama and qwen3; never in qwen2
  bool mlp_bias = false;  // on gate_proj, up_proj and down_proj (llama)
  bool qk_norm = false;   // RMSNorm over head_dim of q and k, before rope (qwen3)

  Rope rope;
  // [num_hidden_layers], W of each layer: a query sees the W keys q - W < k <= q of its document; 0 sees all.
  std::vector<int64_t> window;

  std::optional<int64_t> bos_token_id;
  std::vector<int64_t> eos_token_ids;  // one id or a list; may be empty
  std::optional<int64_t> pad_token_id;
  std::optional<Dtype> dtype;  // of the stored weights, from `dtype` or `torch_dtype`

  // BadConfig names `source` and the key: one that is missing, of the wrong type or out of range, a
  // model_type, architecture, activation or rope type that is not supported, or any key whose value asks for
  // something that would change the result here (quantization_config, dropout, partial rotary, ...).
  static HfConfig from_json(const Json& json, const std::string& source);
  static HfConfig from_folder(const std::filesystem::path& folder);  // folder/config.json

  // The JSON that came in, with every key it had, known here or not.  With `stored` the key that names the
  // dtype of the weights says that instead.
  Json to_json(std::optional<Dtype> stored = std::nullopt) const;

 private:
  Json json_;
};

// The model's name in the registry, as verl gives it (llama, mistral -> "llama3"; qwen2, qwen3 -> "qwen3"),
// and its flavor: torchtitan's ("8B", "0.6B", "debugmodel", ...) where all sizes are those of one of its
// flavors, else made of its numbers ("30L576D").
struct ModelName {
  std::string name;
  std::string flavor;
  std::string hf_model_type;
};
ModelName derive_model_name_and_flavor(const HfConfig& config);

}  // namespace titanium
