// Decoding against scoring: in bf16 the log-probs that a sampler gives are those of a pass over the whole
// text, to the bit, however the prompts are batched (design D5).
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>

#include "titanium/base/random.h"
#include "titanium/rollout/generate.h"
#include "titanium/train/score.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

std::vector<int64_t> random_ids(uint64_t stream, int64_t n) {
  const Random random(11, Purpose::kTest, stream);
  std::vector<int64_t> ids;
  for (int64_t t = 0; t < n; ++t) ids.push_back(static_cast<int64_t>(random.uniform(t) * 60));
  return ids;
}

class Decode : public testing::TestWithParam<const char*> {};

TEST_P(Decode, GivesTheBitsOfScoring) {
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  const TrainConfig config = load_train_config(std::nullopt, {});  // bf16 of fp32 masters
  const Session session =
      open_session(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/models/" + GetParam(), config, log);
  // One prompt, then others that share much of it, all of it, its first token; and one that shares nothing.
  const std::vector<int64_t> base = random_ids(0, 70);
  std::vector<std::vector<int64_t>> prompts = {base, random_ids(1, 5), base, {base[0]}, base};
  prompts[4].resize(50);
  for (const int64_t id : random_ids(2, 9)) prompts[4].push_back(id);
  prompts.push_back(prompts[4]);
  prompts.push_back(random_ids(3, 33));

  SamplingOptions options;
  options.temperature = 0.8;
  options.seed = 3;
  options.logprobs = true;
  options.max_new_tokens = 9;
  for (int64_t id = 0; id < 400; id += 7)
    options.stop_ids.push_back(id);  // places are free at different times
  const auto all = generate(*session.model, *session.store, prompts, options);
  int64_t stopped = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    Sample sample;
    sample.ids.assign(prompts[i].begin(), prompts[i].end());
    sample.ids.insert(sample.ids.end(), all[i].ids.begin(), all[i].ids.end());
    sample.loss_mask.assign(sample.ids.size(), 1);
    sample.temperature = 0.8;
    const TokenScores scores = score_samples(*session.step, {sample}, 4096, "budget").at(0);
    ASSERT_EQ(all[i].logprobs.size(), all[i].ids.size());
    for (size_t t = 0; t < all[i].ids.size(); ++t)
      EXPECT_EQ(all[i].logprobs[t], scores.logprob[prompts[i].size() + t]) << i << " " << t;
    stopped += all[i].stopped;
  }
  EXPECT_GT(stopped, 0);
  for (const int64_t at_once : {1, 2, 3, 6}) {
    options.max_sequences = at_once;
    std::vector<int64_t> told(prompts.size(), 0);
    const auto some = generate(*session.model, *session.store, prompts, options,
                               [&](size_t prompt, int64_t id) { told[prompt] += id; });
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(some[i].ids, all[i].ids) << i << " " << at_once;
      EXPECT_EQ(some[i].logprobs, all[i].logprobs) << i << " " << at_once;
      EXPECT_EQ(some[i].stopped, all[i].stopped);
      EXPECT_EQ(told[i], std::accumulate(all[i].ids.begin(), all[i].ids.end(), int64_t{0}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Decode,
                         testing::Values("llama3", "llama_tied", "qwen2", "qwen3", "qwen3_tied",
                                         "mistral_swa"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace titanium
