// Every dense model family against Hugging Face's numbers: log-probs, entropies, loss, gradients,
// generations.
#include <gtest/gtest.h>

#include "titanium/base/error.h"
#include "titanium/train/check.h"

namespace titanium {
namespace {

const char* const kModels[] = {"llama3",      "llama_tied", "llama_bf16", "llama_headdim",
                               "mistral_swa", "qwen2",      "qwen3",      "qwen3_tied"};

struct Variant {
  const char* name;
  std::vector<std::string> overrides;
};

// Three documents of 13, 7 and 20 tokens: budgets of 40, 27 and 20 tokens make one, two and three
// micro-batches.
const Variant kVariants[] = {
    {"none", {"activation_checkpoint.mode=none"}},
    {"op", {"activation_checkpoint.mode=selective"}},
    {"every2", {"activation_checkpoint.mode=selective", "activation_checkpoint.selective_ac_option=2"}},
    {"full", {"activation_checkpoint.mode=full"}},
    {"split2", {"training.max_tokens_per_microbatch=27"}},
    {"split3", {"training.max_tokens_per_microbatch=20", "activation_checkpoint.mode=full"}},
    {"all_rows", {"training.head_rows=all"}},
};

void expect_ok(const std::string& model, std::vector<std::string> overrides) {
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  // Longest record first, so that budgets below it are accepted.
  overrides.insert(overrides.begin(), "training.seq_len=20");
  const TrainConfig config = load_train_config(std::nullopt, overrides);
  const auto lines =
      check_model(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/models/" + model, config, log);
  EXPECT_GT(lines.size(), 20u);
  for (const CheckLine& line : lines) {
    EXPECT_TRUE(line.ok()) << model << ": " << line.quantity << " differs by " << line.difference
                           << ", allowed " << line.tolerance;
  }
}

class Parity : public testing::TestWithParam<std::tuple<const char*, Variant>> {};

TEST_P(Parity, Float32) {
  auto [model, variant] = GetParam();
  std::vector<std::string> overrides = {"training.mixed_precision_param=float32"};
  overrides.insert(overrides.end(), variant.overrides.begin(), variant.overrides.end());
  expect_ok(model, overrides);
}

TEST_P(Parity, Float64) {
  auto [model, variant] = GetParam();
  std::vector<std::string> overrides = {"training.dtype=float64", "training.mixed_precision_param=float64",
                                        "training.mixed_precision_reduce=float64",
                                        "optimizer.state_dtype=float64"};
  overrides.insert(overrides.end(), variant.overrides.begin(), variant.overrides.end());
  expect_ok(model, overrides);
}

INSTANTIATE_TEST_SUITE_P(Models, Parity,
                         testing::Combine(testing::ValuesIn(kModels), testing::ValuesIn(kVariants)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
                         });

class ParityBf16 : public testing::TestWithParam<const char*> {};
TEST_P(ParityBf16, Bf16ComputeStaysWithinPlainBf16Arithmetic) {
  expect_ok(GetParam(), {"training.mixed_precision_param=bfloat16"});
}
INSTANTIATE_TEST_SUITE_P(Models, ParityBf16, testing::ValuesIn(kModels));

TEST(Check, SaysWhatIsMissing) {
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  try {
    check_model(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/tokenizer", load_train_config(std::nullopt),
                log);
    FAIL() << "a folder without reference values was accepted";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("expected.safetensors"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace titanium
