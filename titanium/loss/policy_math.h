// What the policy terms share.
#pragma once
#include <algorithm>
#include <cmath>

#include "titanium/loss/policy_terms.h"

namespace titanium {

struct Ratio {
  double value = 1, slope = 1;  // exp(clamp(d, -20, 20)), and its derivative by l
};
inline Ratio clamped_ratio(double d) {
  const double r = std::exp(std::clamp(d, -20.0, 20.0));
  return {r, std::abs(d) <= 20 ? r : 0};
}

inline double log_ratio(const PolicyInput& in, size_t t) {
  return in.logprob[t] - in.old_logprob[t];
}

inline PolicyTerm empty_term(const PolicyInput& in) {
  return {Column(in.rows.tokens()), Column(in.rows.tokens()), TermWeight::kToken, {}};
}

inline void set(PolicyTerm& term, const PolicyInput& in, size_t t, double loss, double slope) {
  const double w = in.rollout_weight.empty() ? 1 : in.rollout_weight[t];
  term.loss[t] = loss * w;
  term.slope[t] = slope * w;
}

// A mean over masked-in tokens.
template <typename Values>
Report token_report(const Rows& rows, const Values& values) {
  Report report;
  rows.each([&](size_t t) {
    report.sum += values(t);
    report.count += 1;
  });
  return report;
}

// ppo_kl = mean of -d, clamped as the loss clamps it.
inline Report ppo_kl(const PolicyInput& in, bool clamped) {
  return token_report(in.rows, [&](size_t t) {
    const double d = log_ratio(in, t);
    return clamped ? -std::clamp(d, -20.0, 20.0) : -d;
  });
}

}  // namespace titanium
