#include <algorithm>
#include <cmath>
#include <map>

#include "titanium/loss/advantage_rows.h"

namespace titanium {
namespace {

// Rows of a group as the baseline sees them.
struct Traces {
  Matrix gains, sizes;         // G and W, [B][n]
  std::vector<size_t> length;  // [B], n_b
};

// baseline[b][j] = sum over the group of G W / (sum of W + epsilon), at each position j.
Matrix baselines(const RewardRows& rows, const Traces& traces, const TokenBaselineInput& in) {
  Matrix out;
  for (const auto& row : traces.gains) out.emplace_back(row.size(), 0.0);
  std::map<int64_t, std::vector<size_t>> groups;
  for (size_t b = 0; b < out.size(); ++b) groups[rows.group[b]].push_back(b);
  for (auto& [number, members] : groups) {
    if (members.size() < 2) continue;
    size_t width = 0;
    for (size_t b : members) width = std::max(width, out[b].size());
    for (size_t j = 0; j < width; ++j) {
      double weighed = 0, total = 0;
      for (size_t b : members) {
        if (j >= out[b].size()) continue;
        weighed += traces.gains[b][j] * traces.sizes[b][j];
        total += traces.sizes[b][j];
      }
      for (size_t b : members) {
        if (j < out[b].size()) out[b][j] = weighed / (total + in.epsilon);
      }
    }
    if (!in.handle_zero_tail) continue;
    std::stable_sort(members.begin(), members.end(),
                     [&](size_t a, size_t b) { return traces.length[a] > traces.length[b]; });
    const size_t longest = members[0], second = traces.length[members[1]];
    if (traces.length[longest] == second) continue;
    for (size_t j = second; j < out[longest].size(); ++j) out[longest][j] = 0;
  }
  return out;
}

double size_of_score(const TokenBaselineInput& in, size_t b, size_t t) {
  const double w = 1 - 2 * std::exp(in.old_logprob[b][t]) + in.sum_pi_squared[b][t];
  const double is = in.rollout_is_weights.empty() ? 1 : in.rollout_is_weights[b][t];
  return w * is * is;
}

void check(const RewardRows& rows, const TokenBaselineInput& in) {
  check_rows(rows, true);
  check_shape(rows, in.old_logprob, "old log-probs");
  check_shape(rows, in.sum_pi_squared, "sum_pi_squared");
  if (!in.rollout_is_weights.empty()) check_shape(rows, in.rollout_is_weights, "rollout_is_weights");
}

// Suffix sums of rewards at m = 1.
Matrix gains_of(const RewardRows& rows) {
  Matrix gains = rows.rewards;
  for (size_t b = 0; b < gains.size(); ++b) {
    double running = 0;
    for (size_t t = gains[b].size(); t-- > 0;) {
      if (rows.mask[b][t]) running += rows.rewards[b][t];
      gains[b][t] = running;
    }
  }
  return gains;
}

}  // namespace

Advantages optimal_token_baseline(const RewardRows& rows, const TokenBaselineInput& in) {
  check(rows, in);
  Advantages out{rows.rewards, gains_of(rows)};
  Traces traces{out.returns, rows.rewards, std::vector<size_t>(rows.rewards.size(), 0)};
  for (size_t b = 0; b < traces.sizes.size(); ++b) {
    double running = 0;
    for (size_t t = 0; t < traces.sizes[b].size(); ++t) {
      const bool m = rows.mask[b][t];
      if (m) running += size_of_score(in, b, t);
      traces.sizes[b][t] = m ? running : 0;
      traces.length[b] += m;
    }
  }
  const Matrix baseline = baselines(rows, traces, in);
  for (size_t b = 0; b < baseline.size(); ++b) {
    for (size_t t = 0; t < baseline[b].size(); ++t) {
      out.advantages[b][t] = rows.mask[b][t] ? out.returns[b][t] - baseline[b][t] : 0;
    }
  }
  return out;
}

Advantages tir_optimal_token_baseline(const RewardRows& rows, const TokenBaselineInput& in) {
  check(rows, in);
  Advantages out{rows.rewards, gains_of(rows)};
  const size_t B = rows.rewards.size();
  Traces traces{Matrix(B), Matrix(B), std::vector<size_t>(B, 0)};
  for (size_t b = 0; b < B; ++b) {
    double running = 0;
    for (size_t t = 0; t < rows.mask[b].size(); ++t) {
      if (!rows.mask[b][t]) continue;
      running += size_of_score(in, b, t);
      traces.gains[b].push_back(out.returns[b][t]);
      traces.sizes[b].push_back(running);
    }
    traces.length[b] = traces.gains[b].size();
  }
  const Matrix baseline = baselines(rows, traces, in);
  for (size_t b = 0; b < B; ++b) {
    size_t j = 0;
    for (size_t t = 0; t < rows.mask[b].size(); ++t) {
      out.advantages[b][t] = rows.mask[b][t] ? traces.gains[b][j] - baseline[b][j] : 0;
      j += rows.mask[b][t] ? 1 : 0;
    }
  }
  return out;
}

}  // namespace titanium
