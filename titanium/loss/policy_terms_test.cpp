// What the fixtures do not tell apart in the terms of the policy losses.
#include "titanium/loss/policy_terms.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace titanium::rl {
namespace {

// One row of tokens: p before and now, and their advantages.
PolicyInput one_row(const Column& old_p, const Column& p, const Column& advantage) {
  PolicyInput in;
  in.rows.bounds.push_back(static_cast<int64_t>(p.size()));
  in.rows.mask.assign(p.size(), 1);
  for (size_t t = 0; t < p.size(); ++t) {
    in.old_logprob.push_back(std::log(old_p[t]));
    in.logprob.push_back(std::log(p[t]));
  }
  in.advantage = advantage;
  return in;
}

// What the fixtures, with equal thresholds and one advantage a row, do not tell apart.
TEST(PolicyTerms, EachSideOfATrustRegionHasItsOwnThreshold) {
  PolicyLossConfig config;
  config.clip_ratio_low = 0.1;
  config.clip_ratio_high = 0.3;
  const PolicyInput in = one_row({0.5, 0.5, 0.5, 0.5, 0.5}, {0.7, 0.3, 0.45, 0.85, 0.2}, {1, -1, -1, 1, 1});
  const auto kept = [](const PolicyTerm& term) {
    std::vector<bool> out;
    for (const double slope : term.slope) out.push_back(slope != 0);
    return out;
  };
  EXPECT_EQ(kept(dppo_tv(in, config)), (std::vector<bool>{true, false, true, false, true}));
  // KL of a coin of 0.5 and one of 0.8 (or 0.2): 0.223; of 0.9: 0.511.
  const PolicyInput coins = one_row({0.5, 0.5, 0.5, 0.5}, {0.8, 0.2, 0.9, 0.9}, {1, -1, 1, -1});
  EXPECT_EQ(kept(dppo_kl(coins, config)), (std::vector<bool>{true, false, false, true}));
}

TEST(PolicyTerms, GspoBoundsTheRatioOfASequence) {
  for (const double s : {9.5, 10.5}) {
    PolicyInput in = one_row({1, 1}, {1, 1}, {-1, -1});
    in.old_logprob = {-2 * s, -2};
    in.logprob = {-1, -1};  // the mean of their distances is s
    const PolicyTerm term = gspo(in, {});
    for (size_t t = 0; t < 2; ++t) {
      EXPECT_DOUBLE_EQ(term.loss[t], std::exp(std::min(s, 10.0)));
      EXPECT_DOUBLE_EQ(term.slope[t], s > 10 ? 0 : std::exp(s));
    }
  }
}

TEST(PolicyTerms, GmpoTakesNoGradientFromATokenWithoutAdvantage) {
  const PolicyTerm term = geo_mean(one_row({0.5, 0.5}, {0.55, 0.55}, {1, 0}), {});
  EXPECT_NE(term.slope[0], 0);
  EXPECT_EQ(term.slope[1], 0);
  // Neither does its ratio enter: G = exp(log(1.1) / 2), and the row's advantage is 1 / 2.
  EXPECT_NEAR(term.loss[0] + term.loss[1], -0.5 * std::sqrt(1.1), 1e-12);
}

}  // namespace
}  // namespace titanium::rl
