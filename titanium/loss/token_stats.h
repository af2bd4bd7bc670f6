// What the head says of each token, and what a loss makes of it.  Never logits, and a loss knows no mesh.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "titanium/batch/packed_batch.h"
#include "titanium/batch/weights.h"
#include "titanium/loss/report.h"
#include "titanium/ops/linear_logprob.h"

namespace titanium {

// [T] each, entry t for labels[t]; undefined where the loss did not ask for it.
using TokenStats = HeadStats;

// A sum over tokens, never a mean: whatever mean is wanted is in the batch's weights (design D4).
struct LossSum {
  at::Tensor loss;  // scalar, fp64
  Reports reports;  // metrics, the same for every cut into micro-batches that granularity() allows
};

// What a loss must not be cut below (design D5).  Micro-batches always hold whole sequences.
enum class Granularity {
  kToken,
  kSequence,
  kGroup,       // all samples of a Sample::group are in one micro-batch
  kMicroBatch,  // the loss depends on the cut: it takes means over a micro-batch
};

class Loss {
 public:
  virtual ~Loss() = default;
  // Which loss it is, with every setting, in lines: ranks compare theirs, so what may differ between them has
  // no place here.
  virtual std::string settings() const = 0;
  virtual HeadWants wants() const { return {}; }
  // True when statistics are wanted at every position that has a label, not only where there is a weight; of
  // a value model at every position, for the value after the last token has no label.
  virtual bool wants_all_labels() const { return false; }
  // True when they are wanted at every position, the last of a document included (a value after the last
  // token).
  virtual bool wants_all_positions() const { return false; }
  virtual Granularity granularity() const { return Granularity::kToken; }
  // True when it is asked on the source rank of a model-parallel group alone, and the others get its answer
  // (design D8): a loss that costs much, or that has a state.
  virtual bool on_source_rank() const { return false; }
  // How the samples of the global batch are weighed for this loss.
  virtual Averaging averaging() const { return Averaging::kTokenMean; }
  virtual double scale_factor() const { return 0; }  // of seq-mean-token-sum-norm
  // True when the loss is -sum_t weight[t] logprob[t] and nothing else: the head then forms its gradient in
  // the forward and the vocabulary is visited once (ops/linear_logprob.h).
  virtual bool weighted_nll() const { return false; }
  // The sum over the tokens of one micro-batch, differentiable by the statistics in `now`.  BadData names a
  // column that the batch lacks.
  virtual LossSum operator()(const TokenStats& now, const PackedBatch& batch) const = 0;
};

}  // namespace titanium
