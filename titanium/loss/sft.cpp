#include "titanium/loss/sft.h"

#include <ATen/ATen.h>

namespace titanium {

LossSum SftLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  const at::Tensor weight = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble);  // [T]
  return {-(now.logprob.to(at::kDouble) * weight).sum(), {}};
}

}  // namespace titanium
