// Settings of the actor's loss under verl's names.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "titanium/batch/weights.h"
#include "titanium/loss/rollout_correction.h"

namespace titanium {

struct PolicyLossConfig {
  double clip_ratio = 0.2;  // for both bounds, where they are not given
  std::optional<double> clip_ratio_low, clip_ratio_high;
  double clip_ratio_c = 3;                   // > 1, dual clip
  std::string loss_agg_mode = "token-mean";  // see batch/weights.h
  std::optional<double> loss_scale_factor;   // of seq-mean-token-sum-norm, which needs it
  double entropy_coeff = 0;
  bool calculate_entropy = false;  // report the entropy even where its coefficient is 0
  bool use_kl_loss = false;
  double kl_loss_coef = 0.001;
  std::string kl_loss_type = "low_var_kl";  // see loss/kl.h
  double tau_pos = 1, tau_neg = 1.05;       // of sapo, > 0
  struct {
    std::string loss_mode = "vanilla";
    double clip_cov_ratio = 0.0002, clip_cov_lb = 1, clip_cov_ub = 5;
    double kl_cov_ratio = 0.0002, ppo_kl_coef = 0.1;
    double dro_beta = 0.1;  // > 0
  } policy_loss;
  RolloutCorrectionConfig rollout_correction;  // read by bypass_mode
  int64_t seed = 0;                            // of clip_cov's draw

  double low() const { return clip_ratio_low.value_or(clip_ratio); }
  double high() const { return clip_ratio_high.value_or(clip_ratio); }
  Averaging averaging() const { return averaging_from(loss_agg_mode); }

  // BadConfig names the key, what was given and what is allowed.
  void check() const;
};

// Every setting, a line each.
std::string settings(const PolicyLossConfig& config);

}  // namespace titanium
