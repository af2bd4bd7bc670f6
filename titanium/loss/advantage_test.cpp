#include "titanium/loss/advantage.h"

#include "titanium/base/error.h"
#include "titanium/loss/fixtures_test.h"
#include "titanium/loss/rollout_correction.h"

namespace titanium::rl {
namespace {

Matrix matrix(const Column& flat, int64_t B) {
  Matrix out;
  const int64_t n = static_cast<int64_t>(flat.size()) / B;
  for (int64_t b = 0; b < B; ++b) out.emplace_back(flat.begin() + b * n, flat.begin() + (b + 1) * n);
  return out;
}
Column flat(const Matrix& rows) {
  Column out;
  for (const auto& row : rows) out.insert(out.end(), row.begin(), row.end());
  return out;
}
std::vector<std::vector<uint8_t>> mask_rows(const std::vector<uint8_t>& mask, int64_t B) {
  std::vector<std::vector<uint8_t>> out;
  const int64_t n = static_cast<int64_t>(mask.size()) / B;
  for (int64_t b = 0; b < B; ++b) out.emplace_back(mask.begin() + b * n, mask.begin() + (b + 1) * n);
  return out;
}

RewardRows rows_of(const Case& c) {
  const auto shape = c.shape("response_mask");
  RewardRows rows;
  rows.mask = mask_rows(c.mask("response_mask"), shape[0]);
  if (c.has("token_level_rewards")) {
    rows.rewards = matrix(c.input("token_level_rewards"), shape[0]);
  } else {
    rows.rewards.assign(static_cast<size_t>(shape[0]), std::vector<double>(static_cast<size_t>(shape[1]), 0));
  }
  if (c.has("index")) {
    for (double g : c.input("index")) rows.group.push_back(static_cast<int64_t>(g));
  }
  return rows;
}

Advantages estimate(const Case& c) {
  const Json& p = c.params();
  const RewardRows rows = rows_of(c);
  const int64_t B = static_cast<int64_t>(rows.rewards.size());
  const std::string name = c.name.substr(0, c.name.find("__"));
  const bool norm = p.value("norm_adv_by_std_in_grpo", true);
  if (name == "gae") return gae(rows, matrix(c.input("values"), B), p.at("gamma"), p.at("lam"));
  if (name == "grpo" || name == "grpo_vectorized") return grpo(rows, norm, p.at("epsilon"));
  if (name == "grpo_passk") return grpo_passk(rows, norm, p.at("epsilon"));
  if (name == "rloo") return rloo(rows);
  if (name == "rloo_vectorized") return rloo(rows, /*single_keeps_score=*/false);
  if (name == "opo") return opo(rows);
  if (name == "gpg") return gpg_outcome(rows);
  if (name == "reinforce_plus_plus_baseline") return reinforce_plus_plus_baseline(rows);
  if (name == "reinforce_plus_plus") return reinforce_plus_plus(rows, p.at("gamma"));
  if (name == "remax") return remax(rows, c.input("reward_baselines"));
  if (name == "gdpo") {
    if (c.has("reward_a")) {
      return gdpo(rows, {c.input("reward_a"), c.input("reward_b")}, p.at("weights").get<Column>());
    }
    Column scores;
    for (const auto& row : rows.rewards) {
      scores.push_back(0);
      for (double r : row) scores.back() += r;
    }
    return gdpo(rows, {scores}, {1});
  }
  TokenBaselineInput in{matrix(c.input("old_log_probs"), B),
                        matrix(c.input("sum_pi_squared"), B),
                        {},
                        p.at("handle_zero_tail"),
                        p.at("epsilon")};
  if (c.has("rollout_is_weights")) in.rollout_is_weights = matrix(c.input("rollout_is_weights"), B);
  if (name == "optimal_token_baseline") return optimal_token_baseline(rows, in);
  if (name == "tir_optimal_token_baseline") return tir_optimal_token_baseline(rows, in);
  throw Bug("no estimator {}", name);
}

TEST(Advantage, EveryEstimatorOfTheFixtures) {
  int seen = 0;
  for (const Case& c : cases("advantage")) {
    if (c.name.starts_with("masked_whiten")) continue;
    const Advantages out = estimate(c);
    expect_values(flat(out.advantages), c, "advantages");
    expect_values(flat(out.returns), c, "returns");
    ++seen;
  }
  EXPECT_EQ(seen, 2 * 48);
}

TEST(Advantage, WhiteningOfTheFixtures) {
  for (const Case& c : cases("advantage")) {
    if (!c.name.starts_with("masked_whiten")) continue;
    const int64_t B = c.shape("values")[0];
    const Matrix values = matrix(c.input("values"), B);
    const auto mask = mask_rows(c.mask("mask"), B);
    expect_values(flat(masked_whiten(values, mask, c.params().at("shift_mean"))), c, "whitened");
    expect_value(masked_moments(values, mask).mean, c, "masked_mean");
    expect_value(masked_moments(values, mask).variance, c, "masked_var");
  }
}

// A tool's answer between two turns is not an action: credit passes over it, and a reward there is not lost.
TEST(Advantage, B13_GaeSkipsMaskedTokens) {
  RewardRows rows{{{0, 0, 0, 1}}, {{1, 0, 0, 1}}, {}};
  const Matrix values{{0, 0, 0, 0}};
  Advantages out = gae(rows, values, 1, 0.5, /*whiten=*/false);
  EXPECT_DOUBLE_EQ(out.advantages[0][0], 0.5);
  EXPECT_DOUBLE_EQ(out.advantages[0][3], 1);
  rows.mask = {{1, 0, 1, 0}};
  out = gae(rows, values, 1, 0.5, /*whiten=*/false);
  EXPECT_DOUBLE_EQ(out.advantages[0][0], 0.5);
  EXPECT_DOUBLE_EQ(out.advantages[0][2], 1);
}

TEST(Advantage, NothingToTrainOnIsFinite) {
  const RewardRows rows{{{1, 2}, {3}}, {{0, 0}, {0}}, {0, 0}};
  const Matrix values{{0, 0}, {0}};
  for (const Advantages& out :
       {gae(rows, values, 1, 1), grpo(rows), rloo(rows), opo(rows), gpg_outcome(rows),
        reinforce_plus_plus_baseline(rows), grpo_passk(rows), gdpo(rows, {{1, 2}}, {1}),
        reinforce_plus_plus(rows, 1), remax(rows, {0, 0}), optimal_token_baseline(rows, {values, values, {}}),
        tir_optimal_token_baseline(rows, {values, values, {}})}) {
    for (double a : flat(out.advantages)) EXPECT_TRUE(std::isfinite(a));
    for (double r : flat(out.returns)) EXPECT_TRUE(std::isfinite(r));
  }
}

TEST(Advantage, WhatDoesNotFitIsRefused) {
  const RewardRows rows{{{1, 2}, {3}}, {{1, 1}, {1}}, {0, 1}};
  EXPECT_THROW(gae(rows, {{0, 0}}, 1, 1), BadData);
  EXPECT_THROW(gae(rows, {{0, 0}, {0, 0}}, 1, 1), BadData);
  EXPECT_THROW(grpo({{{1}}, {{1}}, {}}), BadData);
  EXPECT_THROW(grpo({{{1}}, {{1, 1}}, {0}}), BadData);
  EXPECT_THROW(grpo_passk(rows), BadData);  // groups of one
  EXPECT_THROW(remax(rows, {1}), BadData);
  EXPECT_THROW(gdpo(rows, {{1}}, {1}), BadData);
  EXPECT_THROW(gdpo(rows, {}, {}), BadData);
}

// ---- rollout correction

RolloutCorrectionConfig correction_of(const Case& c) {
  const Json& p = c.params();
  const auto text = [&](const char* key) {
    if (!p.contains(key) || p.at(key).is_null()) return std::string();
    return p.at(key).is_string() ? p.at(key).get<std::string>() : p.at(key).dump();
  };
  RolloutCorrectionConfig config;
  config.rollout_is = text("rollout_is");
  config.rollout_is_threshold = text("rollout_is_threshold");
  config.rollout_is_batch_normalize = p.value("rollout_is_batch_normalize", false);
  config.rollout_rs = text("rollout_rs");
  config.rollout_rs_threshold = text("rollout_rs_threshold");
  config.check();
  return config;
}

Rows flat_rows(const std::vector<uint8_t>& mask, int64_t B) {
  Rows rows;
  rows.mask = mask;
  for (int64_t b = 0; b < B; ++b) rows.bounds.push_back((b + 1) * static_cast<int64_t>(mask.size()) / B);
  return rows;
}

TEST(RolloutCorrection, EveryCaseOfTheFixtures) {
  int seen = 0;
  for (const Case& c : cases("rollout_correction")) {
    const Rows rows = flat_rows(c.mask("response_mask"), c.shape("response_mask")[0]);
    const auto out =
        rollout_correction(rows, c.input("train_log_prob"), c.input("rollout_log_prob"), correction_of(c));
    expect_values(Column(out.mask.begin(), out.mask.end()), c, "modified_response_mask");
    if (c.expected().contains("rollout_is_weights")) expect_values(out.weights, c, "rollout_is_weights");
    expect_metrics(out.reports, c);
    ++seen;
  }
  EXPECT_EQ(seen, 2 * 26);
}

// Two halves, added up, are the whole.
TEST(RolloutCorrection, ReportsAreTheSameForEverySplit) {
  for (const Case& c : cases("rollout_correction")) {
    if (c.params().value("rollout_is_batch_normalize", false)) continue;
    const auto shape = c.shape("response_mask");
    const auto part = [&](int64_t from, int64_t to) {
      const auto cut = [&](const auto& v) {
        return std::decay_t<decltype(v)>(v.begin() + from * shape[1], v.begin() + to * shape[1]);
      };
      return rollout_correction(flat_rows(cut(c.mask("response_mask")), to - from),
                                cut(c.input("train_log_prob")), cut(c.input("rollout_log_prob")),
                                correction_of(c))
          .reports;
    };
    const Reports whole = part(0, shape[0]);
    Reports sum = part(0, 2);
    add_reports(sum, part(2, 3));
    add_reports(sum, part(3, shape[0]));
    ASSERT_EQ(sum.size(), whole.size());
    for (const auto& [name, report] : whole) {
      EXPECT_NEAR(sum.at(name).value(), report.value(), 1e-12 * (1 + std::abs(report.value()))) << name;
    }
  }
}

TEST(RolloutCorrection, MaskedPositionsHaveNoPart) {
  const double nan = std::nan(""), inf = INFINITY;
  const Rows rows = flat_rows({1, 0, 1, 0, 0, 0}, 2);
  RolloutCorrectionConfig config;
  config.rollout_is = "sequence";
  config.rollout_rs = "token_k1, seq_max_k3";
  config.rollout_rs_threshold = "2, 5";
  const auto clean = rollout_correction(rows, {-1, 0, -2, 0, 0, 0}, {-1.1, 0, -1.9, 0, 0, 0}, config);
  const auto dirty =
      rollout_correction(rows, {-1, nan, -2, inf, nan, -inf}, {-1.1, inf, -1.9, nan, nan, inf}, config);
  EXPECT_EQ(clean.mask, dirty.mask);
  EXPECT_EQ(clean.weights, dirty.weights);
  for (const auto& [name, report] : clean.reports) {
    EXPECT_EQ(report.value(), dirty.reports.at(name).value()) << name;
    EXPECT_TRUE(std::isfinite(report.value())) << name;
  }
}

TEST(RolloutCorrection, BadTextsAreRefused) {
  const auto refused = [](const char* is, const char* threshold, const char* rs, const char* rs_threshold,
                          const char* named) {
    RolloutCorrectionConfig config;
    config.rollout_is = is;
    config.rollout_is_threshold = threshold;
    config.rollout_rs = rs;
    config.rollout_rs_threshold = rs_threshold;
    try {
      config.check();
      ADD_FAILURE() << is << threshold << rs << rs_threshold;
    } catch (const BadConfig& e) {
      EXPECT_NE(std::string(e.what()).find(named), std::string::npos) << e.what();
    }
  };
  refused("tokens", "2", "", "", "rollout_is = 'tokens'");
  refused("token", "-2", "", "", "rollout_is_threshold");
  refused("token", "2x", "", "", "rollout_is_threshold");
  refused("token", "3_2", "", "", "rollout_is_threshold");
  refused("token", "nan", "", "", "rollout_is_threshold");
  refused("", "2", "seq_max_k1", "2", "rollout_rs");
  refused("", "2", "token_k4", "2", "rollout_rs");
  refused("", "2", "token_k1", "", "rollout_rs_threshold");
  refused("", "2", "token_k1,token_k2,token_k3", "2,3", "rollout_rs_threshold");
  refused("", "2", "token_k2", "1_2", "rollout_rs_threshold");
  refused("", "2", " , ", "2", "rollout_rs");
}

}  // namespace
}  // namespace titanium::rl
