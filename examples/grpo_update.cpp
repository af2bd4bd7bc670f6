// A GRPO update, from given answers to new weights: what an RL trainer asks of the engine.
//   grpo_update <Hugging Face folder>
#include <algorithm>
#include <cstdio>
#include <stdexcept>

#include "titanium/engine/engine.h"
#include "titanium/loss/advantage.h"
#include "titanium/loss/policy_loss.h"

using namespace titanium;

// Stand-ins for a rollout engine and a reward: 2 prompts with 4 answers each, and a liking for small ids.
static std::vector<Sample> rollouts() {
  std::vector<Sample> samples;
  for (int i = 0; i < 8; ++i) {
    Sample sample;
    sample.group = i / 4;  // answers to one prompt
    for (int t = 0; t < 12 + i; ++t) {
      const bool prompt = t < 6;
      sample.ids.push_back(prompt ? 10 + 7 * (i / 4) + t : (37 * i + 11 * t * t) % 200);
      sample.loss_mask.push_back(prompt ? 0 : 1);
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}
static double reward(const Sample& sample) {
  return static_cast<double>(
      std::count_if(sample.ids.begin(), sample.ids.end(), [](int id) { return id < 100; }));
}

static void update(const char* folder) {
  Log log;
  const Json json = {{"model", {{"path", folder}}},
                     {"engine", {{"dtype", "float32"}, {"max_token_len_per_gpu", 64}}},
                     {"optimizer", {{"lr", 1e-4}}}};
  const EngineConfig config = EngineConfig::from_json(json);
  const auto engine = EngineRegistry().create("language_model", "titanium", "cpu", config, log);
  engine->initialize();

  EngineBatch batch;
  batch.samples = rollouts();
  batch.temperature = 0.8;  // of the rollouts: log-probs here and there are of the same distribution
  {                         // log-probs before the update
    auto scope = engine->eval_mode();
    const Jagged rows = engine->infer_batch(batch).model_output.at("log_probs");
    for (int64_t i = 0; i < rows.rows(); ++i) {
      const at::Tensor row = rows.row(i);
      std::vector<double> old(1, 0.0);  // entry t of a row is about token t + 1
      for (int64_t t = 0; t + 1 < row.numel(); ++t) old.push_back(row[t].item<double>());
      batch.samples[i].columns["old_log_probs"] = old;
    }
  }
  RewardRows answers;
  for (const Sample& sample : batch.samples) {
    answers.rewards.emplace_back(sample.ids.size(), 0.0);
    answers.rewards.back().back() = reward(sample);  // at the last token
    answers.mask.push_back(sample.loss_mask);
    answers.group.push_back(sample.group);
  }
  const Advantages found = grpo(answers);
  for (size_t i = 0; i < found.advantages.size(); ++i)
    batch.samples[i].columns["advantages"] = found.advantages[i];

  const PolicyLoss loss{PolicyLossConfig()};  // PPO's clip at 0.2
  for (int epoch = 0; epoch < 3; ++epoch) {
    auto scope = engine->train_mode();
    for (const auto& [name, report] : engine->train_batch(batch, loss).metrics)
      std::printf("%s %.6f  ", name.c_str(), report.value());
    std::printf("lr %g\n", engine->lr_scheduler_step());
  }
  auto [stream, adapter] = engine->get_per_tensor_param({});  // to the rollout engine, in bf16
  while (const auto item = stream.next()) std::printf("%s ", item->name.c_str());
  std::printf("\nsent %zu tensors, %lu bytes\n", stream.header().tensors.size(), stream.header().bytes);
}

int main(int count, char** arguments) try {
  if (count != 2) throw std::invalid_argument("usage: grpo_update <Hugging Face folder>");
  update(arguments[1]);
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
