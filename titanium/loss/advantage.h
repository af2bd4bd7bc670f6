// Advantages and returns from rewards: plain functions over rows of a whole batch, in double.
//
// B rows of n positions; the rows may have different lengths.  m = mask, n_b = its sum, s_b = the sum of a
// row's rewards over all positions (the outcome score).  group[b]: rows with one number are answers to one
// prompt. Where nothing else is said, an advantage of a row stands at every position with m = 1, 0 elsewhere,
// and returns = advantages.  Names and formulas are verl's (core_algos.py, release 0.9.1).
#pragma once
#include <cstdint>
#include <vector>

namespace titanium {

using Matrix = std::vector<std::vector<double>>;  // [B][n]

struct RewardRows {
  Matrix rewards;                          // [B][n]
  std::vector<std::vector<uint8_t>> mask;  // [B][n]
  std::vector<int64_t> group;              // [B], where the estimator uses groups
};

struct Advantages {
  Matrix advantages, returns;  // [B][n]
};

// Every function: BadData for rows of different lengths or numbers, values of another shape, no group where
// one is needed.

// Moments over all positions with m = 1; deviation n - 1 form, variance 0 of fewer than two.
struct MaskedMoments {
  double mean = 0, variance = 0;
};
MaskedMoments masked_moments(const Matrix& values, const std::vector<std::vector<uint8_t>>& mask);
// (x - mean) / sqrt(variance + 1e-8), everywhere; shift_mean = false adds the mean back.
Matrix masked_whiten(const Matrix& values, const std::vector<std::vector<uint8_t>>& mask,
                     bool shift_mean = true);

// Generalised advantage estimation (Schulman et al., 2016), backwards: delta = reward + gamma V_next - V,
// A = delta + gamma lam A_next.  Positions with m = 0 are skipped: V_next and A_next stay, and a reward there
// counts for the last position with m = 1 before it.  Then whitened over the batch, with what stands at m = 0
// too; returns = A before that + V.
Advantages gae(const RewardRows& rows, const Matrix& values, double gamma, double lam, bool whiten = true);

// (s - mean of the group) / (its deviation + epsilon), or without the division (Dr.GRPO).  A group of one
// keeps s / (1 + epsilon), or s.
Advantages grpo(const RewardRows& rows, bool norm_by_std = true, double epsilon = 1e-6);
// k / (k - 1) (s - mean); a group of one keeps s, or gets 0 (verl's rloo_vectorized).
Advantages rloo(const RewardRows& rows, bool single_keeps_score = true);
// s less the group's mean weighed by n_b; a group of one keeps s.
Advantages opo(const RewardRows& rows);
// alpha (s - mean), alpha = B / rows with s != 0; a group of one keeps alpha s.
Advantages gpg_outcome(const RewardRows& rows);
// s - mean, whitened over the batch.
Advantages reinforce_plus_plus_baseline(const RewardRows& rows);
// The best of a group gets what it leads by, divided by the deviation + epsilon; all others 0.  BadData: a
// group of one.
Advantages grpo_passk(const RewardRows& rows, bool norm_by_std = true, double epsilon = 1e-6);
// grpo of each reward component, scores [C][B], summed by `weights` [C] and whitened over the batch.
Advantages gdpo(const RewardRows& rows, const Matrix& scores, const std::vector<double>& weights,
                double epsilon = 1e-6);

// Returns G_t = reward_t + gamma G_(t+1), skipping m = 0; advantages = G whitened, returns = G at m = 1.
Advantages reinforce_plus_plus(const RewardRows& rows, double gamma);
// G = sum of later rewards at m = 1; advantage = G - baseline of the row (the reward of its greedy answer).
Advantages remax(const RewardRows& rows, const std::vector<double>& baselines);

// A baseline for each position of a group that minimises the variance of the gradient, from the size of each
// token's score: w = 1 - 2 exp(l_old) + sum_pi_squared.
struct TokenBaselineInput {
  Matrix old_logprob, sum_pi_squared;  // [B][n]
  Matrix rollout_is_weights;           // [B][n], or empty for 1
  bool handle_zero_tail = true;        // where only the longest row of a group is left, its baseline is 0
  double epsilon = 1e-8;
};
Advantages optimal_token_baseline(const RewardRows& rows, const TokenBaselineInput& in);
// The same by the count of trained tokens instead of positions, for rows with gaps (tool calls).
Advantages tir_optimal_token_baseline(const RewardRows& rows, const TokenBaselineInput& in);

}  // namespace titanium
