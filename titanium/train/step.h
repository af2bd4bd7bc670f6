// One training step's work: batches and the loss come from outside, gradients go into the store.
#pragma once
#include <map>
#include <span>
#include <vector>

#include "titanium/schedule/options.h"
#include "titanium/schedule/run.h"

namespace titanium {

// A pipeline over mesh.pp(): the blocks of each stage, and in which order stages run.
struct PipelineOptions {
  std::string schedule;       // a name of pipeline.h, or
  std::string csv, csv_file;  // PyTorch's CSV, where it came from a file
  int32_t stages_per_rank = 1;
  StagePlacing stages;

  PipelineOrder order(int32_t ranks, int32_t micro_batches) const;
  // "1F1B, 2 stages: embedding, layers 0-14 on pp 0; layers 15-29, head on pp 1", of a model of `blocks`.
  std::string text(int32_t blocks) const;
};

struct StepOptions {
  PlanOptions plan;
  bool keep_cheap = false;  // see BlockInput
  HeadRows head_rows = HeadRows::kWeighted;
  bool keep_casts = true;  // from one call to the next; else their memory is given back
  std::shared_ptr<const PipelineOptions> pipeline = nullptr;  // null: the model is in one stage
};

// What one call works out.
struct StepRequest {
  const Loss* loss = nullptr;  // null: statistics alone, forward
  bool forward_only = true;
  HeadWants wants = {};  // statistics beside those that the loss wants
  HeadRows rows =
      HeadRows::kWeighted;  // at least these; the loss and StepOptions::head_rows may ask for more
};

class TrainStep {
 public:
  // model and store outlive it.  For a group of one `options.plan` gathers once a plan, whatever it says.
  TrainStep(const Model& model, ParamStore& store, StepOptions options);

  // One pass over the micro-batches: their statistics (entry t of [T] for labels[t], 0 at rows that nobody
  // asked for), the loss, and unless forward_only its gradient, added into the store.
  WorkResult run(const std::vector<PackedBatch>& batches, const StepRequest& request);

  // Adds the gradient of the loss over all micro-batches into the store, and returns the loss: both sums,
  // with every mean in the batches' weights.  May be called several times before an update.
  LossSum forward_backward(const std::vector<PackedBatch>& batches, const Loss& loss);

  // The loss alone.
  LossSum forward(const std::vector<PackedBatch>& batches, const Loss& loss);

  // Statistics of every micro-batch, entry t of [T] for labels[t]; rows outside `rows` are 0.
  std::vector<TokenStats> score(const std::vector<PackedBatch>& batches, HeadWants wants, HeadRows rows);

  const Plan& plan(int32_t micro_batches, bool forward_only);  // made and checked once, then kept
  PlanTask task(int32_t micro_batches, bool forward_only) const;
  // Of every pipeline rank, and their plans.
  std::vector<PlanTask> tasks(int32_t micro_batches, bool forward_only) const;
  std::vector<Plan> plans(const std::vector<PlanTask>& tasks) const;
  const StepOptions& options() const { return options_; }
  const Model& model() const { return model_; }
  const RankPart& part() const { return executor_.part(); }
  const std::vector<RankPart>& parts() const { return executor_.parts(); }  // of every pipeline rank
  ParamStore& store() { return store_; }
  const ParamStore& store() const { return store_; }

 private:
  BlockInput input(const PackedBatch& batch, HeadRows rows) const;
  HeadRows rows(const StepRequest& request) const;

  const Model& model_;
  ParamStore& store_;
  StepOptions options_;
  Executor executor_;
  std::map<std::pair<int32_t, bool>, Plan> plans_;
};

}  // namespace titanium
