#include "titanium/loss/policy_loss.h"

#include "titanium/loss/fixtures_test.h"
#include "titanium/loss/kl.h"
#include "titanium/loss/policy_terms.h"
#include "titanium/loss/sft.h"
#include "titanium/loss/value_loss.h"

namespace titanium::rl {
namespace {

std::string text_of(const Json& value) {
  return value.is_null() ? "" : value.is_string() ? value.get<std::string>() : value.dump();
}

PolicyLossConfig config_of(const Case& c, int64_t T) {
  const Json& p = c.params();
  PolicyLossConfig config;
  config.policy_loss.loss_mode = p.value("loss", "vanilla");
  config.clip_ratio = p.at("clip_ratio");
  config.clip_ratio_low = p.at("clip_ratio_low").get<double>();
  config.clip_ratio_high = p.at("clip_ratio_high").get<double>();
  config.clip_ratio_c = p.at("clip_ratio_c");
  config.loss_agg_mode = p.at("loss_agg_mode");
  if (config.loss_agg_mode == "seq-mean-token-sum-norm") {
    config.loss_scale_factor = static_cast<double>(T);  // the reference's default
    const Json info = p.value("global_batch_info", Json::object());
    if (info.contains("loss_scale_factor") && !info.at("loss_scale_factor").is_null()) {
      config.loss_scale_factor = info.at("loss_scale_factor").get<double>();
    }
  }
  config.tau_pos = p.value("tau_pos", 1.0);
  config.tau_neg = p.value("tau_neg", 1.05);
  auto& l = config.policy_loss;
  l.dro_beta = p.value("dro_beta", l.dro_beta);
  l.clip_cov_ratio = p.value("clip_cov_ratio", l.clip_cov_ratio);
  l.clip_cov_lb = p.value("clip_cov_lb", l.clip_cov_lb);
  l.clip_cov_ub = p.value("clip_cov_ub", l.clip_cov_ub);
  l.kl_cov_ratio = p.value("kl_cov_ratio", l.kl_cov_ratio);
  l.ppo_kl_coef = p.value("ppo_kl_coef", l.ppo_kl_coef);
  if (p.contains("rollout_correction")) {
    const Json& r = p.at("rollout_correction");
    config.rollout_correction.loss_type = r.at("loss_type");
    config.rollout_correction.rollout_is = text_of(r.at("rollout_is"));
    config.rollout_correction.rollout_is_threshold = text_of(r.at("rollout_is_threshold"));
    config.rollout_correction.rollout_rs = text_of(r.at("rollout_rs"));
    config.rollout_correction.rollout_rs_threshold = text_of(r.at("rollout_rs_threshold"));
  }
  if (p.contains("kl_loss_type")) {
    config.use_kl_loss = true;
    config.kl_loss_type = p.at("kl_loss_type");
    config.kl_loss_coef = p.at("kl_loss_coef");
    config.entropy_coeff = p.at("entropy_coeff");
  }
  return config;
}

Grid grid_of(const Case& c, const char* mask = "response_mask") {
  const auto shape = c.shape(mask);
  Grid grid{shape[0], shape[1], c.mask(mask), {}};
  const std::pair<const char*, const char*> names[] = {{"old_log_prob", "old_log_probs"},
                                                       {"advantages", "advantages"},
                                                       {"ref_log_prob", "ref_log_prob"},
                                                       {"rollout_is_weights", "rollout_is_weights"},
                                                       {"values", "values"},
                                                       {"returns", "returns"}};
  for (const auto& [input, column] : names) {
    if (c.has(input)) grid.columns[column] = c.input(input);
  }
  return grid;
}

PackedBatch batch_for(const Case& c, const Grid& grid, const Loss& loss, const std::string& mode) {
  const auto samples = samples_of(grid);
  // geo_mean is a mean over the rows that are there, whatever the counts of the global batch.
  const Counts counts = mode == "geo_mean" ? count(samples) : counts_of(c, samples);
  return batch_of(weigh_all(samples, loss.averaging(), counts, loss.scale_factor()));
}

// The mean of the reference is over the tokens that are left after rejection.
void weigh_what_is_left(PackedBatch& batch, const Case& c, const Grid& grid, const PolicyLossConfig& config) {
  Rows rows;
  rows.mask = grid.mask;
  for (int64_t b = 0; b < grid.B; ++b) rows.bounds.push_back((b + 1) * grid.T);
  const auto left =
      rollout_correction(rows, c.input("log_prob"), c.input("old_log_prob"), config.rollout_correction).mask;
  const double n = static_cast<double>(std::count(left.begin(), left.end(), 1));
  for (double& w : batch.weight) w = w != 0 ? 1 / n : 0;
}

TEST(PolicyLoss, EveryModeOfTheFixtures) {
  int seen = 0;
  for (const Case& c : cases("policy_loss")) {
    const Grid grid = grid_of(c);
    const PolicyLossConfig config = config_of(c, grid.T);
    const std::string& mode = config.policy_loss.loss_mode;
    const PolicyLoss loss(config);
    PackedBatch batch = batch_for(c, grid, loss, mode);
    if (mode == "bypass_mode") weigh_what_is_left(batch, c, grid, config);
    TokenStats now;
    now.logprob = statistic(c.input("log_prob"), grid.B, grid.T, c.dtype());
    const LossSum sum = loss(now, batch);
    const double D = mode == "geo_mean" ? 1 : dp_size(c);
    expect_value(sum.loss.item<double>() * D, c, "loss");
    expect_value(sum.reports.at("actor/pg_loss").value() * D, c, "loss");
    expect_values(rows_back(gradient(sum.loss, now.logprob), grid.B, grid.T, D), c, "grad_log_prob");
    expect_metrics(sum.reports, c);
    ++seen;
  }
  EXPECT_EQ(seen, 2 * 79);
}

TEST(PolicyLoss, ActorTotalOfTheFixtures) {
  for (const Case& c : cases("actor_total")) {
    const Grid grid = grid_of(c);
    const PolicyLoss loss(config_of(c, grid.T));
    const PackedBatch batch = batch_for(c, grid, loss, "vanilla");
    TokenStats now;
    now.logprob = statistic(c.input("log_prob"), grid.B, grid.T, c.dtype());
    now.entropy = statistic(c.input("entropy"), grid.B, grid.T, c.dtype());
    const LossSum sum = loss(now, batch);
    expect_value(sum.loss.item<double>(), c, "total");
    expect_value(sum.reports.at("actor/pg_loss").value(), c, "pg");
    expect_value(sum.reports.at("actor/entropy_loss").value(), c, "entropy_loss");
    expect_value(sum.reports.at("kl_loss").value(), c, "kl_loss");
    expect_values(rows_back(gradient(sum.loss, now.logprob), grid.B, grid.T), c, "grad_log_prob");
    expect_values(rows_back(gradient(sum.loss, now.entropy), grid.B, grid.T), c, "grad_entropy");
  }
}

// The averaging modes, by the loss that is nothing else: SFT of the log-prob -x.
TEST(Averaging, EveryModeOfTheFixtures) {
  for (const Case& c : cases("agg_loss")) {
    const auto shape = c.shape("loss_mask");
    const Grid grid{shape[0], shape[1], c.mask("loss_mask"), {}};
    Column minus = c.input("loss_mat");
    for (double& x : minus) x = -x;
    const SftLoss loss(averaging_from(c.params().at("loss_agg_mode").get<std::string>()),
                       c.params().value("loss_scale_factor", static_cast<double>(grid.T)));
    const PackedBatch batch = batch_for(c, grid, loss, "");
    TokenStats now;
    now.logprob = statistic(minus, grid.B, grid.T, c.dtype());
    const LossSum sum = loss(now, batch);
    expect_value(sum.loss.item<double>() * dp_size(c), c, "loss");
    expect_values(rows_back(gradient(sum.loss, now.logprob), grid.B, grid.T, -dp_size(c)), c,
                  "grad_loss_mat");
  }
}

TEST(ValueLoss, EveryCaseOfTheFixtures) {
  for (const Case& c : cases("value_loss")) {
    const Grid grid = grid_of(c);
    const ValueLoss loss({.cliprange_value = c.params().at("cliprange_value"),
                          .loss_agg_mode = c.params().at("loss_agg_mode"),
                          .loss_scale_factor = {}});
    const PackedBatch batch = batch_for(c, grid, loss, "");
    TokenStats now;
    now.value = statistic(c.input("vpreds"), grid.B, grid.T, c.dtype());
    const LossSum sum = loss(now, batch);
    expect_value(sum.loss.item<double>(), c, "vf_loss");
    expect_value(sum.reports.at("critic/vf_loss").value(), c, "vf_loss");
    expect_value(sum.reports.at("critic/vf_clipfrac").value(), c, "vf_clipfrac");
    expect_values(rows_back(gradient(sum.loss, now.value), grid.B, grid.T), c, "grad_vpreds");
  }
}

TEST(Kl, EveryEstimatorOfTheFixtures) {
  int seen = 0;
  for (const Case& c : cases("kl_penalty")) {
    if (!c.params().contains("kl_penalty") || c.has("token_level_scores")) continue;
    const KlEstimator estimator(c.params().at("kl_penalty").get<std::string>());
    const Column l = c.input("log_prob"), ref = c.input("ref_log_prob"), upstream = c.input("upstream");
    Column value, slope;
    for (size_t i = 0; i < l.size(); ++i) {
      const KlEstimate k = estimator(l[i], ref[i]);
      value.push_back(k.value);
      slope.push_back(k.slope * upstream[i]);
    }
    expect_values(value, c, "kl");
    expect_values(slope, c, "grad_log_prob");
    ++seen;
  }
  EXPECT_EQ(seen, 2 * 14);
}

TEST(Kl, TheAdaptiveRewardOfTheFixtures) {
  for (const Case& c : cases("kl_penalty")) {
    if (!c.has("token_level_scores")) continue;
    const auto shape = c.shape("response_mask");
    Rows rows;
    rows.mask = c.mask("response_mask");
    for (int64_t b = 0; b < shape[0]; ++b) rows.bounds.push_back((b + 1) * shape[1]);
    const Json& p = c.params();
    AdaptiveKl control(p.at("init_coef"), p.at("target_kl"), p.at("horizon"));
    const KlEstimator estimator(p.at("kl_penalty").get<std::string>(), "kl_penalty");
    for (int i = 0; i < 3; ++i) {
      const std::string n = std::to_string(i);
      const KlInReward out = kl_in_reward(rows, c.input("token_level_scores"), c.input("old_log_probs"),
                                          c.input("ref_log_prob"), estimator, control.coef());
      expect_close(control.coef(), c.expected().at("coef_" + n), c.fp64, "coef_" + n);
      expect_close(out.current_kl, c.expected().at("current_kl_" + n), c.fp64, "current_kl_" + n);
      expect_values(out.rewards, c, ("rewards_" + n).c_str());
      control.update(out.current_kl, p.at("n_steps"));
    }
    expect_close(control.coef(), c.expected().at("coef_3"), c.fp64, "coef_3");
  }
}

}  // namespace
}  // namespace titanium::rl
