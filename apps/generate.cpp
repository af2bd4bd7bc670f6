#include <fmt/format.h>
#include <unistd.h>

#include <iostream>

#include "apps/commands.h"
#include "apps/on_ranks.h"
#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/rollout/generate.h"
#include "titanium/train/session.h"
#include "titanium/train/training_data.h"

namespace titanium {
namespace {

struct Flags {
  std::string folder, dtype = "float32", system;
  std::vector<std::string> prompts;
  bool chat = false;
  int64_t samples = 1;
  SamplingOptions sampling;
};

std::vector<int64_t> encode_prompt(const Flags& flags, const TextTools& text, const std::string& prompt) {
  if (!flags.chat) return text.tokenizer->encode(prompt, /*add_special_tokens=*/true).ids;
  if (!text.chat_template)
    throw BadConfig("{}: --chat needs a chat template, and the folder has none", flags.folder);
  ChatInput input;
  if (!flags.system.empty()) input.messages.push_back({{"role", "system"}, {"content", flags.system}});
  input.messages.push_back({{"role", "user"}, {"content", prompt}});
  input.add_generation_prompt = true;
  input.bos_token = text.tokenizer->special_text(text.tokenizer->special().bos);
  input.eos_token = text.tokenizer->special_text(text.tokenizer->special().eos);
  return text.tokenizer->encode(text.chat_template->render(input).text).ids;
}

// Every rank gathers the whole model and computes the same tokens; the first one shows them.
int run_generate(const Flags& flags, const TrainConfig& config, const std::shared_ptr<World>& world) {
  Log log(log_of(*world, LogLevel::kWarning));
  const bool leads = world->rank() == 0;
  if (config.parallelism.tensor_parallel_degree > 1) {
    throw BadConfig(
        "parallelism.tensor_parallel_degree = {}: generate keeps keys and values of whole attention heads on "
        "every rank; allowed: 1",
        config.parallelism.tensor_parallel_degree);
  }
  if (config.parallelism.pipeline_parallel_degree > 1) {
    throw BadConfig(
        "parallelism.pipeline_parallel_degree = {}: generate runs the whole model on every rank, token by "
        "token; allowed: 1",
        config.parallelism.pipeline_parallel_degree);
  }
  SamplingOptions sampling = flags.sampling;
  sampling.check();
  if (!flags.system.empty() && !flags.chat) throw BadConfig("--system is a part of --chat: give both");
  const TextTools text = agreed(world->all(), [&] { return load_text_tools(flags.folder, ""); });
  if (!text.tokenizer) throw BadConfig("{}: tokenizer.json is missing", flags.folder);
  Session session = open_session(flags.folder, config, log, /*load_weights=*/true, world);
  sampling.stop_ids = text.tokenizer->special().stop;
  std::vector<std::vector<int64_t>> prompts;
  for (const std::string& prompt : flags.prompts) {
    prompts.push_back(encode_prompt(flags, text, prompt));
    if (prompts.back().empty()) throw BadConfig("--prompt '{}': has no token", prompt);
    for (int64_t i = 1; i < flags.samples; ++i) prompts.push_back(prompts.back());
  }

  const int64_t positions = session.spec.config.max_position_embeddings;
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int64_t end = static_cast<int64_t>(prompts[i].size()) + sampling.max_new_tokens;
    if (positions > 0 && end > positions) {
      log.warn(
          "prompt {} has {} tokens and {} may follow, the model was made for {} (max_position_embeddings of "
          "its config.json)",
          i, prompts[i].size(), sampling.max_new_tokens, positions);
    }
  }

  const bool streams = prompts.size() == 1;  // several would mix on the terminal
  StreamDecoder decoder(*text.tokenizer, /*skip_special=*/true);
  const auto show = [&](size_t, int64_t id) { std::cout << decoder.push(id) << std::flush; };
  const auto results =
      generate(*session.model, *session.store, prompts, sampling, streams && leads ? OnToken(show) : nullptr);
  if (!leads) return 0;
  if (streams) {
    std::cout << decoder.finish() << std::endl;
    return 0;
  }
  for (size_t i = 0; i < results.size(); ++i) {
    fmt::print("[{}] {}\n{}\n\n", i, flags.prompts[i / static_cast<size_t>(flags.samples)],
               text.tokenizer->decode(results[i].ids, /*skip_special=*/true));
  }
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("generate", "continue prompts with a model");
  command->add_option("dir", flags->folder, "the model's Hugging Face folder")
      ->required()
      ->check(not_empty());
  command->add_option("-p,--prompt", flags->prompts, "a prompt; several run as one batch")
      ->required()
      ->allow_extra_args(false);
  command->add_flag("--chat", flags->chat, "put the prompt into the model's chat template");
  command->add_option("--system", flags->system, "the system message of --chat");
  command->add_option("--samples", flags->samples, "texts for each prompt, which is read once")
      ->check(CLI::Range(int64_t{1}, kMostCount))
      ->capture_default_str();
  command->add_option("--max-sequences", flags->sampling.max_sequences, "decoded at once; 0 is all")
      ->check(CLI::Range(int64_t{0}, kMostCount))
      ->capture_default_str();
  command->add_option("--temperature", flags->sampling.temperature, "0 is greedy")->capture_default_str();
  command->add_option("--top-k", flags->sampling.top_k, "0 is all")
      ->check(CLI::Range(int64_t{0}, kMostCount))
      ->capture_default_str();
  command->add_option("--top-p", flags->sampling.top_p)->capture_default_str();
  command->add_option("--seed", flags->sampling.seed)->check(whole_number())->capture_default_str();
  command->add_option("-n,--max-new-tokens", flags->sampling.max_new_tokens)
      ->check(CLI::Range(int64_t{1}, kMostCount))
      ->capture_default_str();
  command->add_option("--dtype", flags->dtype)
      ->check(CLI::IsMember({"float32", "float64", "bfloat16"}))
      ->capture_default_str();
  command->allow_extras();
  command->footer(
      "Keys of `titanium train` are taken too, e.g. --parallelism.data_parallel_shard_degree=2 under "
      "`titanium launch`.");
  command->callback([flags, command, &run] {
    run = [flags, command] {
      const TrainConfig config = command_config(flags->dtype, command->remaining());
      return on_ranks(config.comm, [&](const auto& world) { return run_generate(*flags, config, world); });
    };
  });
}

}  // namespace titanium
