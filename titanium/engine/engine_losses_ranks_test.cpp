// Every loss on data ranks: value, gradients and metrics are those of one rank.
#include <memory>

#include "titanium/engine/test_ranks.h"
#include "titanium/loss/policy_loss.h"
#include "titanium/loss/preference.h"
#include "titanium/loss/value_loss.h"

namespace titanium {
namespace {

// Eight samples in four pairs, with all that any loss reads; some are longer on the second data rank.
std::vector<Sample> samples() {
  std::vector<Sample> all = test_samples({6, 9, 4, 11, 17, 13, 12, 15}, 3);
  for (size_t i = 0; i < all.size(); ++i) {
    Sample& sample = all[i];
    const Random random(7, Purpose::kTest, i);
    uint64_t next = 0;
    const auto column = [&](const char* name, double low, double high) {
      for (int64_t t = 0; t < sample.size(); ++t)
        sample.columns[name].push_back(low + (high - low) * random.uniform(next++));
    };
    column("old_log_probs", -7, -4);
    column("ref_log_prob", -7, -4);
    column("advantages", -2, 2);
    column("rollout_is_weights", 0.5, 2);
    column("values", -1, 1);
    column("returns", -1, 1);
    sample.group = static_cast<int64_t>(i / 2);
    sample.seq_columns["chosen"] = i % 2 == 0 ? 1 : 0;
    sample.seq_columns["margin"] = 0.1 * static_cast<double>(i);
  }
  return all;
}

struct Outcome {
  double loss = 0;
  Reports metrics;
  Whole gradients;
};

void run(const Loss& loss, const std::string& model_type, const Layout& layout, Outcome& outcome) {
  std::mutex mutex;
  Json json = engine_json("llama3", "float64");
  json["engine"]["seed"] = 3;  // of a value head
  on_ranks(
      json, layout,
      [&](RankEngine& engine) {
        EngineBatch batch = test_batch(engine.share(samples()));
        if (loss.granularity() == Granularity::kMicroBatch) {  // the same ones on every layout
          for (int64_t i = 0; i < static_cast<int64_t>(batch.samples.size()); i += 2)
            batch.micro.given.push_back({i, i + 1});
        } else {
          batch.micro.max_tokens = 32;
        }
        const EngineOutput out = engine->forward_backward_batch(batch, &loss, false);
        EXPECT_GT(out.loss.size(), 1u);
        outcome.gradients.add_gradients(*engine);
        const std::lock_guard lock(mutex);
        if (engine.is_source()) outcome.loss += total(out);
        outcome.metrics = out.metrics;
      },
      model_type);
}

void expect_as_on_one_rank(const Loss& loss, const std::string& what,
                           const std::string& model_type = "language_model") {
  SCOPED_TRACE(what);
  Outcome one;
  run(loss, model_type, {.name = "one rank"}, one);
  EXPECT_GT(one.gradients.norm(), 0);
  for (const Layout& layout :
       {Layout{.name = "fsdp2", .shard = 2}, Layout{.name = "ddp2_tp2", .replicate = 2, .tp = 2},
        Layout{.name = "fsdp2_pp2", .shard = 2, .pp = 2}}) {
    SCOPED_TRACE(layout.name);
    Outcome got;
    run(loss, model_type, layout, got);
    EXPECT_NEAR(got.loss, one.loss, 1e-9);
    EXPECT_LT(got.gradients.difference(one.gradients), 1e-9);
    ASSERT_EQ(got.metrics.size(), one.metrics.size());
    for (const auto& [name, report] : one.metrics)
      EXPECT_NEAR(got.metrics.at(name).value(), report.value(), 1e-9 * (1 + std::abs(report.value())))
          << name;
  }
}

class PolicyModes : public testing::TestWithParam<std::string> {};

TEST_P(PolicyModes, OnDataRanksIsAsOnOne) {
  PolicyLossConfig config;
  config.policy_loss.loss_mode = GetParam();
  // Bounds that hold back about half of the tokens.
  config.policy_loss.clip_cov_lb = -1;
  config.policy_loss.clip_cov_ub = 1;
  config.policy_loss.clip_cov_ratio = config.policy_loss.kl_cov_ratio = 0.3;
  config.entropy_coeff = 0.01;
  config.use_kl_loss = true;
  config.rollout_correction.rollout_is = "token";
  config.rollout_correction.rollout_rs = "token_k1";
  config.rollout_correction.rollout_rs_threshold = "0.5_3";
  for (const char* averaging : {"token-mean", "seq-mean-token-mean"}) {
    config.loss_agg_mode = averaging;
    expect_as_on_one_rank(PolicyLoss(config), averaging);
  }
}

INSTANTIATE_TEST_SUITE_P(Losses, PolicyModes,
                         testing::Values("vanilla", "gspo", "sapo", "gpg", "dro", "cispo", "dppo_tv",
                                         "dppo_kl", "clip_cov", "kl_cov", "geo_mean", "bypass_mode"),
                         [](const auto& info) { return info.param; });

TEST(LossesOnRanks, OthersOnDataRanksAreAsOnOne) {
  expect_as_on_one_rank(SftLoss(), "sft");
  expect_as_on_one_rank(SftLoss(Averaging::kSeqMeanTokenSum), "sft of sequences");
  expect_as_on_one_rank(DpoLoss(), "dpo");
  expect_as_on_one_rank(ValueLoss(), "value", "value_model");
  expect_as_on_one_rank(RewardModelLoss({.use_margin = true, .center_rewards_coefficient = 0.01}), "reward",
                        "value_model");
}

}  // namespace
}  // namespace titanium
