#include "titanium/train/estimate.h"

#include <gtest/gtest.h>

#include "titanium/dist/planned_world.h"
#include "titanium/optim/optimizer.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

struct Planned {
  Session session;
  std::unique_ptr<Optimizer> optimizer;
  StepShape shape;
  StepEstimate estimate;

  const StepEstimate::Rank& own() const { return estimate.ranks.at(session.store->mesh().at().pp); }
  int64_t padded() const {  // elements of all units
    int64_t numel = 0;
    for (const UnitPlace& place : session.store->places()) numel += session.store->size_of(place).numel;
    return numel;
  }
};

// llama3 of tests/data/models (D 64, 2 layers): AdamW, fp32 masters, bf16 compute, two micro-batches of 64.
Planned plan(int rank, int ranks, std::vector<std::string> keys) {
  keys.insert(keys.end(), {"training.seq_len=32", "training.max_tokens_per_microbatch=64"});
  const TrainConfig config = load_train_config(std::nullopt, keys);
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  Planned p;
  p.session = open_session(TITANIUM_SOURCE_DIR "/tests/data/models/llama3", config, log,
                           /*load_weights=*/false, planned_world(rank, ranks));
  p.optimizer = make_optimizer(*p.session.store, optimizer_options(config.optimizer));
  p.shape = {64, 32, 2};
  p.estimate = estimate_step(*p.session.step, *p.optimizer, p.shape);
  return p;
}

TEST(Estimate, WhatARankKeepsIsItsShare) {
  const Planned one = plan(0, 1, {});
  const int64_t n = one.padded();
  EXPECT_EQ(one.own().memory.masters, 4 * n);
  EXPECT_EQ(one.own().memory.optimizer, 8 * n);
  EXPECT_EQ(one.own().memory.weights, 2 * n);  // casts, kept from step to step
  for (const int ranks : {2, 4, 8}) {
    int64_t masters = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const Planned p = plan(rank, ranks, {});
      EXPECT_EQ(p.own().memory.optimizer, 2 * p.own().memory.masters);
      EXPECT_LT(p.own().memory.total(), one.own().memory.total());
      masters += p.own().memory.masters;
    }
    EXPECT_GE(masters, 4 * n) << ranks;
    EXPECT_LE(masters, 4 * n * 11 / 10) << ranks;  // parts end at aligned places
  }
}

TEST(Estimate, RecomputeKeepsLess) {
  const auto activations = [](const char* mode) {
    return plan(0, 1, {fmt::format("activation_checkpoint.mode={}", mode)}).own().memory.activations;
  };
  EXPECT_LT(activations("selective"), activations("none"));
  EXPECT_LT(activations("full"), activations("selective"));
}

TEST(Estimate, BytesOfEachAxis) {
  const Planned one = plan(0, 1, {});
  const AxisBytes none = one.own().bytes;
  EXPECT_EQ(none.dp_shard + none.dp_replicate + none.tp + none.pp, 0);

  // An all-reduce brings 2 (n - 1) / n of the fp32 gradients, once a step.
  const Planned ddp = plan(1, 2, {"parallelism.data_parallel_replicate_degree=2"});
  EXPECT_DOUBLE_EQ(ddp.own().bytes.dp_replicate, 4.0 * static_cast<double>(ddp.padded()));
  EXPECT_EQ(ddp.own().bytes.dp_shard, 0);

  // One gather of the other half in bf16, and one half of the gradients in fp32.
  const Planned never = plan(0, 2, {"parallelism.fsdp_reshard_after_forward=never"});
  const auto half = static_cast<double>(never.padded()) / 2;
  EXPECT_DOUBLE_EQ(never.own().bytes.dp_shard, 2 * half + 4 * half);
  const Planned each = plan(
      0, 2, {"parallelism.fsdp_reshard_after_forward=never", "parallelism.fsdp_reduce=each_micro_batch"});
  EXPECT_DOUBLE_EQ(each.own().bytes.dp_shard, 2 * half + 2 * 4 * half);
  const Planned always = plan(0, 2, {"parallelism.fsdp_reshard_after_forward=always"});
  EXPECT_GT(always.own().bytes.dp_shard, 2 * never.own().bytes.dp_shard - 4 * half);

  // The stream of 64 tokens in bf16, of both micro-batches, this way or that.
  for (const int rank : {0, 1}) {
    const Planned pp = plan(rank, 2, {"parallelism.pipeline_parallel_degree=2"});
    EXPECT_DOUBLE_EQ(pp.own().bytes.pp, 2 * 64 * 64 * 2) << rank;
  }
  EXPECT_GT(plan(0, 2, {"parallelism.tensor_parallel_degree=2"}).own().bytes.tp, 0);
}

TEST(Estimate, TimeIsWorkByRate) {
  const Planned p = plan(0, 1, {});
  Hardware hw;
  hw.matmul = 1e6;
  hw.matmul_backward = 2e6;
  hw.attention = 3e6;
  hw.attention_backward = 4e6;
  hw.head = 5e6;
  hw.update = 7e6;
  hw.copy = 8e6;
  const PlanCosts costs = estimate_costs(*p.session.step, *p.optimizer, p.estimate, p.shape, hw).at(0);
  const Block::Cost layer = p.session.model->blocks[1]->cost(64, 32, 2);
  EXPECT_DOUBLE_EQ(costs.blocks[1].forward, layer.matmul / 1e6 + layer.attention / 3e6);
  EXPECT_DOUBLE_EQ(costs.blocks[1].backward_weight, layer.matmul / 2e6);
  EXPECT_DOUBLE_EQ(costs.blocks[1].backward_input,
                   layer.matmul / 2e6 + kAttentionBackward * layer.attention / 4e6);
  // Gradient thrice; master, and two states, read and written: 3 * 4 + 2 * 4 + 2 * 8 bytes a weight.
  EXPECT_DOUBLE_EQ(costs.update, 36.0 * static_cast<double>(p.padded()) / 7e6);
}

}  // namespace
}  // namespace titanium
