#include "titanium/train/step.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "titanium/schedule/plan.h"

namespace titanium {

PipelineOrder PipelineOptions::order(int32_t ranks, int32_t micro_batches) const {
  return csv.empty() ? pipeline_order(schedule, ranks, stages_per_rank, micro_batches)
                     : read_pipeline_csv(csv, csv_file, ranks, micro_batches);
}

std::string PipelineOptions::text(int32_t blocks) const {
  const auto& [first, rank_of] = stages;
  std::string all;
  for (size_t s = 0; s < first.size(); ++s) {
    const int32_t begin = first[s], end = s + 1 < first.size() ? first[s + 1] : blocks;
    std::vector<std::string> has;
    if (begin == 0) has.emplace_back("embedding");
    const int32_t from = std::max(begin - 1, 0), to = std::min(end, blocks - 1) - 2;  // layers
    if (from == to) has.push_back(fmt::format("layer {}", from));
    if (from < to) has.push_back(fmt::format("layers {}-{}", from, to));
    if (end == blocks) has.emplace_back("head");
    all += fmt::format("{}{} on pp {}", s > 0 ? "; " : "", fmt::join(has, ", "), rank_of[s]);
  }
  return fmt::format("{}, {} stages: {}", csv.empty() ? schedule : csv_file, first.size(), all);
}

TrainStep::TrainStep(const Model& model, ParamStore& store, StepOptions options)
    : model_(model),
      store_(store),
      options_(std::move(options)),
      executor_(model, store,
                options_.pipeline
                    ? std::shared_ptr<const StagePlacing>(options_.pipeline, &options_.pipeline->stages)
                    : nullptr) {
  if (store.whole()) {
    options_.plan.reshard_after_forward = Reshard::kNever;
    options_.plan.prefetch = 0;
  }
}

std::vector<PlanTask> TrainStep::tasks(int32_t micro_batches, bool forward_only) const {
  std::vector<PlanTask> tasks;
  std::shared_ptr<PipelineOrder> order;
  const auto ranks = static_cast<int32_t>(executor_.parts().size());
  if (options_.pipeline) {
    order = std::make_shared<PipelineOrder>(options_.pipeline->order(ranks, micro_batches));
    if (forward_only) *order = forwards_of(*order);
  }
  for (int32_t r = 0; r < ranks; ++r)
    tasks.push_back({executor_.parts()[r].part, micro_batches, forward_only, order, r});
  return tasks;
}

PlanTask TrainStep::task(int32_t micro_batches, bool forward_only) const {
  return tasks(micro_batches, forward_only).at(store_.mesh().at().pp);
}

std::vector<Plan> TrainStep::plans(const std::vector<PlanTask>& tasks) const {
  if (tasks.size() == 1) return {make_plan(tasks[0], options_.plan)};
  return make_plans(tasks, options_.plan);
}

const Plan& TrainStep::plan(int32_t micro_batches, bool forward_only) {
  const auto [entry, is_new] = plans_.try_emplace({micro_batches, forward_only});
  if (!is_new) return entry->second;
  try {
    entry->second = std::move(plans(tasks(micro_batches, forward_only)).at(store_.mesh().at().pp));
  } catch (...) {
    plans_.erase(entry);
    throw;
  }
  return entry->second;
}

BlockInput TrainStep::input(const PackedBatch& batch, HeadRows rows) const {
  BlockInput in = block_input(model_, batch, store_.dtypes().compute, rows);
  in.keep_cheap = options_.keep_cheap;
  return in;
}

// The widest that anyone asks for: kAll holds kLabelled, which holds kWeighted.
HeadRows TrainStep::rows(const StepRequest& request) const {
  if (!request.loss) return request.rows;
  HeadRows widest = std::min(request.rows, options_.head_rows);
  if (request.loss->wants_all_positions()) return HeadRows::kAll;
  if (request.loss->wants_all_labels()) widest = std::min(widest, HeadRows::kLabelled);
  return widest;
}

WorkResult TrainStep::run(const std::vector<PackedBatch>& batches, const StepRequest& request) {
  const HeadRows head_rows = rows(request);
  HeadWants wants = request.wants;
  bool nll = false;
  if (request.loss) {
    const HeadWants of_loss = request.loss->wants();
    nll = !request.forward_only && request.loss->weighted_nll() && !wants.entropy && !wants.sum_pi_squared;
    wants.entropy = wants.entropy || of_loss.entropy;
    wants.sum_pi_squared = wants.sum_pi_squared || of_loss.sum_pi_squared;
  }
  const auto make = [&](int32_t index) {
    const PackedBatch& batch = batches[index];
    BlockInput in = input(batch, head_rows);
    in.wants = wants;
    if (nll) {
      const at::ScalarType stats = store_.dtypes().compute == at::kDouble ? at::kDouble : at::kFloat;
      in.nll_weight = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble).to(stats);
    }
    return in;
  };
  WorkResult result = executor_.run(plan(static_cast<int32_t>(batches.size()), request.forward_only),
                                    {batches, make, request.loss, request.forward_only});
  if (!options_.keep_casts) store_.release_casts();
  return result;
}

LossSum TrainStep::forward_backward(const std::vector<PackedBatch>& batches, const Loss& loss) {
  return run(batches, {.loss = &loss, .forward_only = false}).loss;
}

LossSum TrainStep::forward(const std::vector<PackedBatch>& batches, const Loss& loss) {
  return run(batches, {.loss = &loss}).loss;
}

std::vector<TokenStats> TrainStep::score(const std::vector<PackedBatch>& batches, HeadWants wants,
                                         HeadRows rows) {
  return run(batches, {.wants = wants, .rows = rows}).stats;
}

}  // namespace titanium
