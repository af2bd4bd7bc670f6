// The critic's loss: half the squared distance to the returns, the larger of plain and clipped.
#pragma once
#include <optional>
#include <string>

#include "titanium/loss/rows.h"
#include "titanium/loss/token_stats.h"

namespace titanium {

struct ValueLossConfig {  // verl's names
  double cliprange_value = 0.5;
  std::string loss_agg_mode = "token-mean";
  std::optional<double> loss_scale_factor;
  void check() const;  // BadConfig names the key, what was given and what is allowed
};

// With vc = clamp(v, v_old - c, v_old + c): 0.5 max((v - ret)^2, (vc - ret)^2), each [T] before its weight.
struct ValueTerm {
  Column loss, slope;  // slope: by v
  Report clipped;      // share of tokens where the clipped side is larger
};
ValueTerm value_term(const Rows& rows, const Column& value, const Column& old_value, const Column& returns,
                     double cliprange);

// Columns: values (before the update), returns.  Reports: critic/vf_loss, critic/vf_clipfrac,
// critic/vpred_mean.
class ValueLoss final : public Loss {
 public:
  explicit ValueLoss(ValueLossConfig config = {});
  std::string settings() const override;
  Averaging averaging() const override { return averaging_from(config_.loss_agg_mode); }
  double scale_factor() const override { return config_.loss_scale_factor.value_or(0); }
  LossSum operator()(const TokenStats& now, const PackedBatch& batch) const override;

 private:
  ValueLossConfig config_;
};

}  // namespace titanium
