// A loss of the caller's own, asked once a micro-batch: a C++ callable, or a Python one behind the socket.
#pragma once
#include <functional>

#include "titanium/loss/token_stats.h"

namespace titanium {

struct ExternalAnswer {
  double loss = 0;      // the micro-batch's part of the objective
  TokenStats gradient;  // of the loss by each statistic, [T]; undefined = none
  Reports reports;
};

// Takes detached statistics of every labelled position (values: of every position), answers with gradients.
// A sum, as every loss: what the caller divides by must hold for the whole global batch.  On many ranks each
// data rank asks for its own micro-batches, on the first rank of its model-parallel group; one without
// samples is not asked for.
class ExternalLoss final : public Loss {
 public:
  using Ask = std::function<ExternalAnswer(const TokenStats& now, const PackedBatch& batch)>;
  explicit ExternalLoss(Ask ask, HeadWants wants = {}, Granularity granularity = Granularity::kMicroBatch)
      : ask_(std::move(ask)), wants_(wants), granularity_(granularity) {}
  std::string settings() const override;
  HeadWants wants() const override { return wants_; }
  bool wants_all_labels() const override { return true; }
  bool on_source_rank() const override { return true; }
  Granularity granularity() const override { return granularity_; }
  // A scalar that has the answer's value and gradients.  BadData: a gradient of a statistic that was not
  // given, or of another length.
  LossSum operator()(const TokenStats& now, const PackedBatch& batch) const override;

 private:
  Ask ask_;
  HeadWants wants_;
  Granularity granularity_;
};

}  // namespace titanium
