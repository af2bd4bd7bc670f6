#include "titanium/loss/value_loss.h"

#include <algorithm>
#include <cmath>

#include "titanium/base/error.h"
#include "titanium/loss/batch_rows.h"

namespace titanium {

void ValueLossConfig::check() const {
  if (!(cliprange_value > 0)) {
    throw BadConfig("cliprange_value = {}; allowed: a number > 0", cliprange_value);
  }
  try {
    if (averaging_from(loss_agg_mode) != Averaging::kSeqMeanTokenSumNorm) return;
  } catch (const BadConfig& e) {
    throw BadConfig("loss_agg_mode: {}", e.what());
  }
  if (!loss_scale_factor || !(*loss_scale_factor > 0) || !std::isfinite(*loss_scale_factor)) {
    throw BadConfig(
        "loss_scale_factor = {}; allowed with loss_agg_mode = seq-mean-token-sum-norm: a number > 0",
        loss_scale_factor ? std::to_string(*loss_scale_factor) : "none");
  }
}

ValueTerm value_term(const Rows& rows, const Column& value, const Column& old_value, const Column& returns,
                     double cliprange) {
  ValueTerm term{Column(rows.tokens()), Column(rows.tokens()), {}};
  rows.each([&](size_t t) {
    const double v = value[t], cut = std::clamp(v, old_value[t] - cliprange, old_value[t] + cliprange);
    const double plain = (v - returns[t]) * (v - returns[t]);
    const double clipped = (cut - returns[t]) * (cut - returns[t]);
    // Where the clipped side is larger v is outside the interval, and the clamp has no gradient.
    term.loss[t] = 0.5 * std::max(plain, clipped);
    term.slope[t] = clipped > plain ? 0 : v - returns[t];
    term.clipped.add(clipped > plain);
  });
  return term;
}

ValueLoss::ValueLoss(ValueLossConfig config) : config_(std::move(config)) {
  config_.check();
}

std::string ValueLoss::settings() const {
  const auto& [cliprange, averaging, scale] = config_;
  return fmt::format("loss value\ncliprange_value = {}\nloss_agg_mode = {}\nloss_scale_factor = {}",
                     cliprange, averaging, scale.value_or(0));
}

LossSum ValueLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  const Rows rows = rows_of(batch);
  const Column value = values_of(now.value, batch, "the values");
  ValueTerm term =
      value_term(rows, value, column(batch, "values"), column(batch, "returns"), config_.cliprange_value);
  double loss = 0;
  Report predicted;
  rows.each([&](size_t t) {
    loss += batch.weight[t] * term.loss[t];
    term.slope[t] *= batch.weight[t];
    predicted.add(value[t]);
  });
  return {with_gradient(loss, {part(now.value, term.slope)}),
          {{"critic/vf_loss", Report::total(loss)},
           {"critic/vf_clipfrac", term.clipped},
           {"critic/vpred_mean", predicted}}};
}

}  // namespace titanium
