#include "titanium/loss/sft.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace titanium {

std::string SftLoss::settings() const {
  return fmt::format("loss sft\nloss_agg_mode = {}\nloss_scale_factor = {}", name(averaging_), scale_factor_);
}

LossSum SftLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  const at::Tensor weight = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble);  // [T]
  const at::Tensor logprob = at::where(weight != 0, now.logprob.to(at::kDouble), 0.0);    // 0 * inf is not 0
  return {-(logprob * weight).sum(), {}};
}

}  // namespace titanium
