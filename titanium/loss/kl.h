// Estimates of a KL divergence from log-probs of single tokens, as a term of a loss and as a part of the
// reward. Names are verl's.
#pragma once
#include <string>
#include <vector>

#include "titanium/loss/rows.h"

namespace titanium {

// d = l - l_ref:  k1 = kl: d;  abs: |d|;  k2 = mse: d^2 / 2;  k3 = low_var_kl: exp(q) - q - 1 cut to +-10,
// with q = -d cut to +-20 (J. Schulman, "Approximating KL divergence", 2020).  A trailing "+" keeps the value
// and takes k2's derivative, d, which is that of the divergence.
struct KlEstimate {
  double value = 0, slope = 0;  // slope: by l
};

class KlEstimator {
 public:
  // BadConfig lists the names; `key` is the config key that gave it.
  explicit KlEstimator(const std::string& name, const std::string& key = "kl_loss_type");
  KlEstimate operator()(double logprob, double reference) const;

 private:
  enum class Kind { kK1, kAbs, kK2, kK3 } kind_;
  bool straight_through_ = false;
};

// rewards = scores - coef * KL(l_old, l_ref) on masked-in tokens.  current_kl is the mean over rows of a
// row's mean, rows without a masked-in token being 0.
struct KlInReward {
  Column rewards;
  double current_kl = 0;
};
KlInReward kl_in_reward(const Rows& rows, const Column& scores, const Column& old_logprob,
                        const Column& ref_logprob, const KlEstimator& estimator, double coef);

// The coefficient that holds the KL near a target (Ziegler et al., "Fine-tuning language models from human
// preferences", 2019): coef *= 1 + clamp(kl / target - 1, -0.2, 0.2) * steps / horizon.
class AdaptiveKl {
 public:
  // BadConfig: target or horizon not > 0.
  AdaptiveKl(double coef, double target, double horizon);
  double coef() const { return coef_; }
  void update(double current_kl, double steps);

 private:
  double coef_, target_, horizon_;
};

}  // namespace titanium
