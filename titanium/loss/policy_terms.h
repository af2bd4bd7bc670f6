// Policy losses, each a pure function of log-probs, old log-probs and advantages.  Names and formulas are
// verl's (verl/trainer/ppo/core_algos.py, release 0.9.1).
//
// l = log-prob, l_old, A = advantage; d = l - l_old, r = exp(clamp(d, -20, 20)).  A clamp has no gradient
// outside its interval.
#pragma once
#include <cstdint>

#include "titanium/loss/policy_config.h"
#include "titanium/loss/report.h"
#include "titanium/loss/rows.h"

namespace titanium {

struct PolicyInput {
  Rows rows;
  Column logprob, old_logprob, advantage;  // [T]
  Column rollout_weight;                   // [T], a constant factor of each token's loss; empty for 1
};

// What a token is drawn by, with its place in the document.
struct TokenNames {
  int64_t update = 0;            // as PackedBatch::update
  std::vector<int64_t> samples;  // [D], each document's number in the global batch
};

// Which weight of the batch a token's loss is multiplied with.
enum class TermWeight {
  kToken,     // weight: the run's averaging
  kSequence,  // seq_weight / n_b: the mean over trained sequences of their token mean, whatever the averaging
  kRow,       // row_weight: a token holds its share of its row's loss, rows without a trained token count
};

struct PolicyTerm {
  Column loss, slope;  // [T]: each token's loss before its weight, and its derivative by l; 0 where masked
  TermWeight weight = TermWeight::kToken;
  Reports reports;  // actor/ppo_kl and the like, means over masked-in tokens
};

// max(-A r, -A clamp(r, 1 - low, 1 + high)), and where A < 0 at most -A c (PPO with dual clip).
PolicyTerm vanilla(const PolicyInput& in, const PolicyLossConfig& config);
// The ratio of a whole sequence, exp of its mean d; each token has that value and a gradient of its own
// (GSPO).
PolicyTerm gspo(const PolicyInput& in, const PolicyLossConfig& config);
// One ratio a row, exp of the mean of d clipped in log space, times the row's mean advantage (GMPO).
PolicyTerm geo_mean(const PolicyInput& in, const PolicyLossConfig& config);

// -A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A (SAPO).
PolicyTerm sapo(const PolicyInput& in, const PolicyLossConfig& config);
PolicyTerm gpg(const PolicyInput& in, const PolicyLossConfig& config);  // -A l
PolicyTerm dro(const PolicyInput& in, const PolicyLossConfig& config);  // -A l + beta / 2 d^2
PolicyTerm cispo(const PolicyInput& in,
                 const PolicyLossConfig& config);  // -[clamp(r, 1 - low, 1 + high)] A l

// -A [min(r, c)] l for tokens within a divergence of the old policy, which low and high bound: total
// variation p - p_old, or the KL divergence of the binary choice "this token or not".
PolicyTerm dppo_tv(const PolicyInput& in, const PolicyLossConfig& config);
PolicyTerm dppo_kl(const PolicyInput& in, const PolicyLossConfig& config);

// PPO where some tokens of high covariance between advantage and log-prob are left out, or -A r plus a
// penalty |d| on those of the highest.  Both take means over the micro-batch: the named exception of design
// D5.  Which tokens are drawn is a function of config.seed and the names, the same on every layout.
PolicyTerm clip_cov(const PolicyInput& in, const PolicyLossConfig& config, const TokenNames& names);
PolicyTerm kl_cov(const PolicyInput& in, const PolicyLossConfig& config);

// old_logprob is the rollout's.  Rejects and, for "reinforce" (-A l w), weighs tokens by
// config.rollout_correction; "ppo_clip" is vanilla on what is left.
PolicyTerm bypass_mode(const PolicyInput& in, const PolicyLossConfig& config);

// The one that config.policy_loss.loss_mode names.
PolicyTerm policy_term(const PolicyInput& in, const PolicyLossConfig& config, const TokenNames& names);

}  // namespace titanium
