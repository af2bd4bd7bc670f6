// The actor's loss: a policy term, less an entropy bonus, plus a KL term.
#pragma once
#include "titanium/loss/policy_config.h"
#include "titanium/loss/token_stats.h"

namespace titanium {

// Columns of the batch, under verl's names: old_log_probs (of bypass_mode: the rollout's), advantages;
// ref_log_prob with use_kl_loss; rollout_is_weights, a factor of each token's policy loss, where it is there.
//
// Reports: actor/pg_loss and actor/entropy_loss, kl_loss (the objective's parts, by its averaging),
// actor/pg_clipfrac, actor/pg_clipfrac_lower, actor/ppo_kl (means over tokens), kl_coef, rollout_corr/... in
// bypass_mode.
class PolicyLoss final : public Loss {
 public:
  explicit PolicyLoss(PolicyLossConfig config);  // BadConfig: see PolicyLossConfig::check
  std::string settings() const override { return titanium::settings(config_); }
  HeadWants wants() const override;
  Granularity granularity() const override;
  Averaging averaging() const override { return config_.averaging(); }
  double scale_factor() const override { return config_.loss_scale_factor.value_or(0); }
  LossSum operator()(const TokenStats& now, const PackedBatch& batch) const override;

 private:
  PolicyLossConfig config_;
};

}  // namespace titanium
