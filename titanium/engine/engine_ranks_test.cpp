#include <algorithm>
#include <atomic>

#include "titanium/base/error.h"
#include "titanium/engine/test_ranks.h"
#include "titanium/loss/policy_loss.h"

namespace titanium {
namespace {

const Layout kOne{"one rank"};
const Layout kLayouts[] = {{.name = "fsdp2", .shard = 2},
                           {.name = "tp2", .tp = 2},
                           {.name = "fsdp2_tp2", .shard = 2, .tp = 2},
                           {.name = "hsdp2x2", .replicate = 2, .shard = 2},
                           {.name = "pp2", .pp = 2},
                           {.name = "pp2_v", .pp = 2, .schedule = "ZBVZeroBubble"},
                           {.name = "pp2_fsdp2_tp2", .shard = 2, .tp = 2, .pp = 2}};

std::vector<Sample> eight() {
  return test_samples({6, 9, 4, 11, 7, 3, 12, 5}, 1, /*vocabulary=*/60);
}

// A loss that moves log-probs towards -1 and entropies towards 0, of the caller's own.
ExternalAnswer answer(const TokenStats& now, const PackedBatch& batch) {
  const at::Tensor weight = at::tensor(batch.weight, at::kDouble);
  const at::Tensor apart = now.logprob.to(at::kDouble) + 1, entropy = now.entropy.to(at::kDouble);
  const at::Tensor loss = (weight * (apart.square() + entropy)).sum();
  const double trained = (weight != 0).sum().item<double>();
  return {loss.item<double>(),
          {2 * weight * apart, weight, {}, {}},
          {{"mine/apart", Report::mean((apart.abs() * (weight != 0)).sum().item<double>(), trained)},
           {"mine/loss", Report::total(loss.item<double>())}}};
}

struct Outcome {
  double loss = 0;
  Reports metrics;
  Whole gradients;
};

void ask_loss_of_caller(const Layout& layout, Outcome& outcome) {
  std::atomic<int64_t> samples_asked = 0;
  std::mutex mutex;
  on_ranks(engine_json("llama3", "float64"), layout, [&](RankEngine& engine) {
    int64_t asked = 0;
    const ExternalLoss loss(
        [&](const TokenStats& now, const PackedBatch& packed) {
          EXPECT_TRUE(engine.is_source());
          ++asked;
          for (const int64_t sample : packed.sample) samples_asked += sample >= 0;
          return answer(now, packed);
        },
        {.entropy = true});
    EngineBatch batch = test_batch(engine.share(eight()));
    batch.micro.max_tokens = 12;
    auto scope = engine->train_mode({.zero_grad_on_exit = false});
    const EngineOutput out = engine->forward_backward_batch(batch, &loss, false);
    EXPECT_EQ(asked > 0, engine.is_source());
    EXPECT_GT(out.loss.size(), 1u);
    outcome.gradients.add_gradients(*engine);
    const std::lock_guard lock(mutex);
    if (engine.is_source()) outcome.loss += total(out);
    outcome.metrics = out.metrics;
  });
  EXPECT_EQ(samples_asked, 8);
}

TEST(EngineRanks, TheCallersLossIsAskedOnOneRankOfAGroup) {
  Outcome one;
  ask_loss_of_caller(kOne, one);
  EXPECT_GT(one.gradients.norm(), 0.1);
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.name);
    Outcome got;
    ask_loss_of_caller(layout, got);
    EXPECT_NEAR(got.loss, one.loss, 1e-9);
    EXPECT_LT(got.gradients.difference(one.gradients), 1e-9);
    ASSERT_EQ(got.metrics.size(), one.metrics.size());
    for (const auto& [name, report] : one.metrics) {
      EXPECT_NEAR(got.metrics.at(name).value(), report.value(), 1e-9) << name;
      EXPECT_EQ(got.metrics.at(name).count > 0, report.count > 0) << name;
    }
  }
}

TEST(EngineRanks, ALossThatThrowsOnOneRankEndsTheCallOnAll) {
  for (const Layout& layout : kLayouts) {
    SCOPED_TRACE(layout.name);
    // Of the last data rank; the first one that asks its own loss is that of data rank 0.
    const int first = layout.schedule == "1F1B" ? layout.ranks() - layout.data() * layout.tp : 0;
    const int source = first + (layout.data() - 1) * layout.tp;
    Whole after, want;
    std::atomic<int> told = 0;
    on_ranks(engine_json("llama3", "float64"), layout, [&](RankEngine& engine) {
      const EngineBatch batch = test_batch(engine.share(eight()));
      const ExternalLoss fails([&](const TokenStats& now, const PackedBatch&) -> ExternalAnswer {
        if (engine.rank == source) throw std::runtime_error("the caller's own");
        return {1, {at::ones_like(now.logprob), {}, {}, {}}, {}};
      });
      {
        auto scope = engine->train_mode();
        told += message_of<BadData>([&] { engine->forward_backward_batch(batch, &fails, false); }) ==
                fmt::format("rank {}: the loss failed: the caller's own", source);
        EXPECT_EQ(all_gradients(*engine).abs().max().item<double>(), 0);
        // An answer that does not fit is found where it was given.
        const ExternalLoss bad([&](const TokenStats& now, const PackedBatch&) {
          return ExternalAnswer{1, {now.logprob.narrow(0, 0, 2), {}, {}, {}}, {}};
        });
        EXPECT_NE(message_of<BadData>([&] {
                    engine->infer_batch(batch, &bad);
                  }).find(fmt::format("rank {}: the loss has", first)),
                  std::string::npos);
      }
      engine->train_batch(batch, SftLoss());  // the engine is as before
      after.add_masters(*engine);
    });
    EXPECT_EQ(told, layout.ranks());
    on_ranks(engine_json("llama3", "float64"), kOne, [&](RankEngine& engine) {
      engine->train_batch(test_batch(eight()), SftLoss());
      want.add_masters(*engine);
    });
    EXPECT_LT(after.difference(want), 1e-9);
  }
}

TEST(EngineRanks, ARankWithoutSamplesIsNotAsked) {
  const Layout layout{.name = "fsdp2_tp2", .shard = 2, .tp = 2};
  Whole got, want;
  std::atomic<int> asked = 0;
  const auto run = [&](const Layout& on, Whole& gradients) {
    asked = 0;
    on_ranks(engine_json("llama3", "float64"), on, [&](RankEngine& engine) {
      EngineBatch batch;
      if (engine->get_data_parallel_rank() == 0) batch = test_batch(eight());
      batch.micro.max_tokens = 24;
      const ExternalLoss loss(
          [&](const TokenStats& now, const PackedBatch& packed) {
            ++asked;
            return answer(now, packed);
          },
          {.entropy = true});
      const EngineOutput out = engine->forward_backward_batch(batch, &loss, false);
      EXPECT_GT(out.loss.size(), 1u);
      if (batch.samples.empty()) {
        EXPECT_EQ(total(out), 0);
      }
      EXPECT_NE(out.metrics.at("mine/loss").value(), 0);
      gradients.add_gradients(*engine);
    });
  };
  run(kOne, want);
  const int of_one = asked;
  run(layout, got);
  EXPECT_EQ(asked, of_one);
  EXPECT_LT(got.difference(want), 1e-9);
}

// What each of two ranks is told, which must be the same; every rank gets a clear error and goes on.
TEST(EngineRanks, WhatDiffersBetweenRanksIsRefusedAndNamed) {
  for (const Layout& layout : {kLayouts[0], kLayouts[1], kLayouts[4]}) {
    SCOPED_TRACE(layout.name);
    std::mutex mutex;
    std::vector<std::string> messages;
    on_ranks(engine_json("llama3"), layout, [&](RankEngine& engine) {
      const bool odd = engine.rank == 1;
      const auto told = [&](const auto& call) {
        const std::string message = message_of<BadConfig>(call);
        const std::lock_guard lock(mutex);
        messages.push_back(message);
      };
      const EngineBatch plain = test_batch(engine.share(eight()));
      const auto call = [&](const std::function<void(EngineBatch&)>& change) {
        EngineBatch batch = plain;
        if (odd) change(batch);
        told([&] { engine->forward_backward_batch(batch, nullptr, true); });
      };
      call([](EngineBatch& b) { b.calculate_entropy = true; });
      call([](EngineBatch& b) { b.temperature = 1; });
      call([](EngineBatch& b) { b.micro.sequences = 2; });
      call([](EngineBatch& b) { b.counts = Counts{100, 20, 3}; });
      PolicyLossConfig config;
      if (odd) config.clip_ratio_high = 0.28;
      const PolicyLoss policy(config);
      told([&] { engine->forward_backward_batch(plain, &policy, true); });
      const SftLoss sft;
      told([&] {
        engine->forward_backward_batch(plain, odd ? static_cast<const Loss*>(&sft) : &policy, true);
      });
      told([&] { engine->forward_backward_batch(plain, odd ? nullptr : &sft, false); });
      engine->forward_backward_batch(plain, &sft, false);
      const ParamGroup group = engine->param_groups()[0];
      if (odd) engine->param_groups()[0].weight_decay = 0.5;
      told([&] { engine->optimizer_step(); });
      engine->param_groups()[0] = group;
      EXPECT_GT(engine->optimizer_step(), 0);
      if (layout.data() == 2) return;
      call([](EngineBatch& b) { b.samples[2].ids[1] += 1; });
      call([](EngineBatch& b) { b.samples.pop_back(); });
    });
    const auto count = [&](const std::string& text) {
      return std::count_if(messages.begin(), messages.end(), [&](const std::string& message) {
        return message.find(text) != std::string::npos;
      });
    };
    for (const char* text :
         {"the call of rank 1 is not that of rank 0: 'calculate_entropy = true'",
          "temperature of all samples",
          "'micro_batch_size_per_gpu = 2' against 'micro_batch_size_per_gpu = 0'", "counts = 100 tokens",
          "'clip_ratio_high = 0.28' against 'clip_ratio_high = 0.2'", "'loss sft' against 'loss policy'",
          "rank 1: forward_backward_batch: a backward needs a loss",
          "param_groups of rank 1 is not that of rank 0: 'weight_decay = 0.5'"})
      EXPECT_EQ(count(text), 2) << text << "; got\n" << testing::PrintToString(messages);
    EXPECT_EQ(count("of the same model-parallel group"), layout.data() == 2 ? 0 : 4);
  }
}

TEST(EngineRanks, ConfigsThatDifferAreFoundAtTheStart) {
  std::atomic<int> told = 0;
  run_ranks(2, [&](std::shared_ptr<World> world) {
    Json json = on_layout(engine_json("llama3"), kLayouts[0]);
    json["model"]["local_path"] = model_folder("llama3") + (world->rank() == 0 ? "/" : "");  // may differ
    TestEngine fine(json, "language_model", true, world);
    json["optimizer"]["lr"] = world->rank() == 0 ? 1e-3 : 2e-3;
    const std::string message =
        message_of<BadConfig>([&] { TestEngine engine(json, "language_model", true, world); });
    told += message.find("the engine config of rank 1 is not that of rank 0: 'optimizer.lr = 0.002'") == 0;
  });
  EXPECT_EQ(told, 2);
}

}  // namespace
}  // namespace titanium
