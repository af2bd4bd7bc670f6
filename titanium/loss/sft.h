// Supervised fine-tuning: the negative log-likelihood of the labels.
#pragma once
#include "titanium/loss/token_stats.h"

namespace titanium {

class SftLoss final : public Loss {
 public:
  explicit SftLoss(Averaging averaging = Averaging::kTokenMean, double scale_factor = 0)
      : averaging_(averaging), scale_factor_(scale_factor) {}
  std::string settings() const override;
  bool weighted_nll() const override { return true; }
  Averaging averaging() const override { return averaging_; }
  double scale_factor() const override { return scale_factor_; }
  LossSum operator()(const TokenStats& now, const PackedBatch& batch) const override;

 private:
  Averaging averaging_;
  double scale_factor_;
};

}  // namespace titanium
