#include <fmt/format.h>

#include <filesystem>
#include <optional>

#include "apps/commands.h"
#include "titanium/base/error.h"
#include "titanium/formats/hf_tensors.h"
#include "titanium/models/model.h"
#include "titanium/report/format.h"
#include "titanium/train/training_data.h"

namespace titanium {
namespace {

bool has_weights(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".safetensors") || name.ends_with(".safetensors.index.json")) return true;
  }
  return false;
}

// The exit status: there may be no weights, but those that are there are the model's.
int show_weights(const std::string& folder, const Model& model) {
  if (!has_weights(folder)) {
    fmt::print("weights     none\n");
    return 0;
  }
  std::optional<HfTensors> tensors;
  try {
    tensors.emplace(folder);
  } catch (const BadCheckpoint& e) {
    fmt::print("weights     cannot be read: {}\n", e.what());
    return exit_code(e.kind());
  }
  fmt::print("weights     {} tensors in {} files, {}\n", tensors->size(), tensors->files().size(),
             human_bytes(tensors->total_bytes()));
  int64_t wrong = 0;
  for (const auto& weight : model.table->weights()) {
    const TensorView* tensor = tensors->find(weight->name());
    if (!tensor && weight->shared()) tensor = tensors->find("lm_head.weight");
    if (!tensor || tensor->shape != weight->shape()) {
      fmt::print("            {}: {}\n", weight->name(), tensor ? "has another shape" : "is missing");
      ++wrong;
    }
  }
  return wrong == 0 ? 0 : 1;
}

int run_info(const std::string& folder) {
  const HfConfig c = HfConfig::from_folder(folder);
  const ModelSpec spec = model_registry(c);
  const Model model = spec.build(c);
  int64_t parameters = 0;
  for (const auto& weight : model.table->weights()) parameters += weight->numel();
  fmt::print("model       {} {} (Hugging Face: {})\n", spec.name.name, spec.name.flavor,
             spec.name.hf_model_type);
  fmt::print("parameters  {} ({})\n", human_number(static_cast<double>(parameters)), parameters);
  fmt::print("layers      {} of width {}, MLP {}\n", c.num_hidden_layers, c.hidden_size, c.intermediate_size);
  fmt::print("attention   {} heads of width {}, {} key heads{}\n", c.num_attention_heads, c.head_dim,
             c.num_key_value_heads, c.qk_norm ? ", normalised" : "");
  fmt::print("vocabulary  {}, head {}\n", c.vocab_size,
             c.tie_word_embeddings ? "tied to the embedding" : "of its own");
  fmt::print("positions   up to {}, rope {} theta {:g}\n", c.max_position_embeddings, name(c.rope.type),
             c.rope.theta);
  const int status = show_weights(folder, model);
  const TextTools text = load_text_tools(folder, "");
  if (text.tokenizer) {
    fmt::print("tokenizer   {} tokens, chat template {}\n", text.tokenizer->vocab_size(),
               text.chat_template ? "present" : "absent");
  } else {
    fmt::print("tokenizer   none\n");
  }
  return status;
}

}  // namespace

void add_info(CLI::App& app, Run& run) {
  auto folder = std::make_shared<std::string>();
  CLI::App* command = app.add_subcommand("info", "what is in a model's folder");
  command->add_option("dir", *folder, "a Hugging Face folder")->required()->check(not_empty());
  command->callback([folder, &run] { run = [folder] { return run_info(*folder); }; });
}

}  // namespace titanium
