// The executor: runs a plan on a model.
#pragma once
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "titanium/loss/token_stats.h"
#include "titanium/models/model.h"
#include "titanium/schedule/action.h"
#include "titanium/schedule/stages.h"
#include "titanium/shard/param_store.h"

namespace titanium {

// What a plan works on.  `input` is called once per micro-batch, when its first action runs, and what it gave
// is freed after the last one.
struct Work {
  const std::vector<PackedBatch>& batches;  // one a micro-batch
  std::function<BlockInput(int32_t micro_batch)> input;
  const Loss* loss = nullptr;  // null: statistics alone
  bool forward_only = false;   // the plan has no backward: the loss is a number, not the start of one
};

struct WorkResult {
  LossSum loss;                   // summed over micro-batches
  std::vector<double> losses;     // per micro-batch
  std::vector<TokenStats> stats;  // per micro-batch, detached
};

class Executor {
 public:
  // `stages`: null for a model in one stage.  The store has this pipeline rank's blocks.
  Executor(const Model& model, ParamStore& store, std::shared_ptr<const StagePlacing> stages = nullptr);

  // What plans are made from: the blocks and units of each pipeline rank, and those of this one.
  const std::vector<RankPart>& parts() const { return parts_; }
  const RankPart& part() const { return parts_[rank_]; }

  // Runs a plan that check() has passed.  In training, gradients have been added into the units when it
  // returns; weights are never touched.  Over a pipeline the result is the last stage's, on every rank.  Bug
  // for an action that needs a second device.
  // Where a loss throws on one rank of several, the plan goes on with zero gradients, so that no rank waits
  // for another, and then all ranks throw: BadData where it is a loss of the source rank and threw no Error.
  WorkResult run(const Plan& plan, const Work& work);

 private:
  // What a block holds between its forward and its backward, for one micro-batch.
  struct Saved {
    at::Tensor input;                                // a leaf, cut from the graph before it
    std::vector<at::Tensor> outputs;                 // where the backward starts
    std::vector<at::Tensor> grads;                   // of the outputs, once known
    std::vector<std::function<void()>> weight_work;  // of a split backward
  };
  struct Transfer {
    at::Tensor tensor;
    Pending pending;
  };
  struct MicroBatch {
    BlockInput input;
    BlockOutput output;
    at::Tensor stream;          // the residual stream after the block that ran last
    std::vector<Saved> blocks;  // [blocks of this rank]
    std::map<std::pair<Kind, int32_t>, Transfer> transfers;  // by block
    std::map<int32_t, at::Tensor> input_grads;  // of stages that give them to another rank, by block
  };
  void forward(const Action& action, MicroBatch& m);
  void run_block(int32_t block, MicroBatch& m);
  // What a loss says of one micro-batch.
  struct Answer {
    LossSum sum;                    // without a graph
    std::vector<at::Tensor> grads;  // by each leaf
  };
  void loss(const Work& work, int32_t index, MicroBatch& m, WorkResult& result);
  Answer ask(const Loss& loss, const TokenStats& now, const PackedBatch& batch,
             const std::vector<at::Tensor>& leaves);
  void share(Answer& answer) const;  // that of the source rank, over its model-parallel group
  void backward(const Action& action, MicroBatch& m);
  void transfer(const Action& action, const PackedBatch& batch, MicroBatch& m);
  const Block& block(int32_t index) const { return *model_.blocks[part().blocks[index]]; }

  // Between the last block of a stage and the first of the next, where they are on two ranks.
  struct Channel {
    Group group;
    int sender;  // in the group
  };

  const Model& model_;
  ParamStore& store_;
  std::vector<RankPart> parts_;
  size_t rank_ = 0;                                       // in the pipeline
  int last_rank_ = 0;                                     // which has the loss
  std::map<std::pair<int32_t, bool>, Channel> channels_;  // by the stage before the boundary; gradients
  std::vector<bool> has_backward_;                        // [blocks]
  std::exception_ptr loss_error_;                         // of the plan that runs: the first one
};

}  // namespace titanium
