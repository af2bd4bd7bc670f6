// What the head says of each token, and what a loss makes of it.  Never logits, and a loss knows no mesh.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "titanium/batch/packed_batch.h"
#include "titanium/ops/linear_logprob.h"

namespace titanium {

// [T] each, entry t for labels[t]; undefined where the loss did not ask for it.
using TokenStats = HeadStats;

// A sum over tokens, never a mean: whatever mean is wanted is in the batch's weights (design D4).
struct LossSum {
  at::Tensor loss;                        // scalar, fp64
  std::map<std::string, double> reports;  // further sums, added up over micro-batches and data ranks
};

class Loss {
 public:
  virtual ~Loss() = default;
  virtual HeadWants wants() const { return {}; }
  // True when the loss is -sum_t weight[t] logprob[t] and nothing else: the head then forms its gradient in
  // the forward and the vocabulary is visited once (ops/linear_logprob.h).
  virtual bool weighted_nll() const { return false; }
  virtual LossSum operator()(const TokenStats& now, const PackedBatch& batch) const = 0;
};

// Supervised fine-tuning: the negative log-likelihood of the labels.
class SftLoss final : public Loss {
 public:
  bool weighted_nll() const override { return true; }
  LossSum operator()(const TokenStats& now, const PackedBatch& batch) const override;
};

}  // namespace titanium
