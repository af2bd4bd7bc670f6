// Losses over pairs of answers, one chosen and one rejected: DPO and the training of reward models.
//
// A pair is a Sample::group with two samples, of which seq_columns["chosen"] is 1 and 0.  The objective is
// the mean over all pairs of the global batch.
#pragma once
#include "titanium/loss/token_stats.h"

namespace titanium {

struct DpoConfig {
  double beta = 0.1;           // > 0
  double label_smoothing = 0;  // 0 to 0.5: the share of labels taken to be wrong (conservative DPO)
  bool use_reference = true;   // column ref_log_prob; without it the reference is uniform
  void check() const;
};

// Of a pair, with S the sum of log-probs over trained tokens and h = beta ((S_c - Sref_c) - (S_r - Sref_r)):
// -(1 - eps) log sigmoid(h) - eps log sigmoid(-h)  (Rafailov et al., 2023).
struct PairLoss {
  double loss = 0, slope = 0;  // slope: by h
};
PairLoss sigmoid_pair_loss(double h, double label_smoothing);

// Reports: dpo/loss, rewards/chosen, rewards/rejected (beta (S - Sref)), rewards/margins, rewards/accuracies:
// means over pairs.  BadData: a group that is not a pair.
class DpoLoss final : public Loss {
 public:
  explicit DpoLoss(DpoConfig config = {});
  std::string settings() const override;
  Granularity granularity() const override { return Granularity::kGroup; }
  LossSum operator()(const TokenStats& now, const PackedBatch& batch) const override;

 private:
  DpoConfig config_;
};

struct RewardModelConfig {
  bool use_margin = false;                // seq_columns["margin"] of the chosen sample
  double center_rewards_coefficient = 0;  // >= 0
  void check() const;
};

// -log sigmoid(r_c - r_r - margin) + coefficient (r_c + r_r)^2, r the value after a sample's last token.
// Reports: reward_model/loss, reward_model/accuracy, reward_model/margin: means over pairs.
class RewardModelLoss final : public Loss {
 public:
  explicit RewardModelLoss(RewardModelConfig config = {});
  std::string settings() const override;
  Granularity granularity() const override { return Granularity::kGroup; }
  bool wants_all_positions() const override { return true; }
  LossSum operator()(const TokenStats& now, const PackedBatch& batch) const override;

 private:
  RewardModelConfig config_;
};

}  // namespace titanium
