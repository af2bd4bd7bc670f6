#include "titanium/train/step.h"

#include <ATen/ATen.h>

#include "titanium/schedule/plan.h"

namespace titanium {

TrainStep::TrainStep(const Model& model, ParamStore& store, StepOptions options)
    : model_(model), store_(store), options_(std::move(options)), executor_(model, store) {
  if (store.replicas().size() == 1) {
    options_.plan.reshard_after_forward = Reshard::kNever;
    options_.plan.prefetch = 0;
  }
}

PlanTask TrainStep::task(int32_t micro_batches, bool forward_only) const {
  return {executor_.part(), micro_batches, forward_only};
}

const Plan& TrainStep::plan(int32_t micro_batches, bool forward_only) {
  const auto [entry, is_new] = plans_.try_emplace({micro_batches, forward_only});
  if (is_new) entry->second = make_plan(task(micro_batches, forward_only), options_.plan);
  return entry->second;
}

BlockInput TrainStep::input(const PackedBatch& batch, HeadRows rows) const {
  BlockInput in = block_input(model_, batch, store_.dtypes().compute, rows);
  in.keep_cheap = options_.keep_cheap;
  return in;
}

LossSum TrainStep::forward_backward(const std::vector<PackedBatch>& batches, const Loss& loss) {
  const auto make = [&](int32_t index) {
    const PackedBatch& batch = batches[index];
    BlockInput in = input(batch, options_.head_rows);
    in.wants = loss.wants();
    if (loss.weighted_nll()) {
      const at::ScalarType stats = store_.dtypes().compute == at::kDouble ? at::kDouble : at::kFloat;
      in.nll_weight = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble).to(stats);
    }
    return in;
  };
  return executor_.run(plan(static_cast<int32_t>(batches.size()), false), {batches, make, &loss}).loss;
}

LossSum TrainStep::forward(const std::vector<PackedBatch>& batches, const Loss& loss) {
  const auto make = [&](int32_t index) {
    BlockInput in = input(batches[index], options_.head_rows);
    in.wants = loss.wants();
    return in;
  };
  return executor_.run(plan(static_cast<int32_t>(batches.size()), true), {batches, make, &loss, true}).loss;
}

std::vector<TokenStats> TrainStep::score(const std::vector<PackedBatch>& batches, HeadWants wants,
                                         HeadRows rows) {
  const auto make = [&](int32_t index) {
    BlockInput in = input(batches[index], rows);
    in.wants = wants;
    return in;
  };
  return executor_.run(plan(static_cast<int32_t>(batches.size()), true), {batches, make, nullptr, true})
      .stats;
}

}  // namespace titanium
