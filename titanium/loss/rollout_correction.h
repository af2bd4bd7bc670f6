// What to do where the policy that wrote the answers is not the policy that learns from them: importance
// weights, rejection, and how far apart the two are.  Formulas are verl's
// (verl/trainer/ppo/rollout_corr_helper.py).
//
// l = log-prob of the learner, l_roll of the writer; d = l - l_roll, clamped to +-20 before any exp.
#pragma once
#include <string>

#include "titanium/loss/report.h"
#include "titanium/loss/rows.h"

namespace titanium {

struct RolloutCorrectionConfig {
  // Importance weights exp(d) of tokens, or exp(sum d) of sequences at each of their tokens.
  std::string rollout_is;                    // "", token, sequence
  std::string rollout_is_threshold = "2.0";  // "x": cut to x; "lo_hi": 0 outside
  bool rollout_is_batch_normalize = false;   // divide by the weights' mean
  // Rejection, options joined by commas: token_k1, token_k2, token_k3, seq_sum_k1, seq_mean_k1, seq_max_k2,
  // ... with k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.  All must pass.
  std::string rollout_rs;
  // One threshold for all, or one an option.  Of k1 "lo_hi", log lo <= k1 <= log hi, or "hi" for 1/hi_hi; of
  // the others an upper bound.
  std::string rollout_rs_threshold;
  std::string loss_type = "ppo_clip";  // of bypass_mode: ppo_clip, reinforce

  // BadConfig names the key, what was given and what is allowed.
  void check() const;
};

struct RolloutCorrection {
  Column weights;             // [T], 0 where masked; empty without rollout_is
  std::vector<uint8_t> mask;  // [T], rows.mask less what is rejected
  // rollout_corr/...: of the weights, of each option, and of the gap between the policies (kl, ppl, chi2).
  // But for rollout_is_batch_normalize, whose mean is of the given rows, all are the same for every split.
  Reports reports;
};

RolloutCorrection rollout_correction(const Rows& rows, const Column& logprob, const Column& rollout_logprob,
                                     const RolloutCorrectionConfig& config);

// The gap alone: rollout_corr/training_ppl, rollout_ppl, kl, k3_kl, log_ppl_diff, ppl_ratio, chi2_token, ...
Reports off_policy_reports(const Rows& rows, const Column& logprob, const Column& rollout_logprob);

}  // namespace titanium
