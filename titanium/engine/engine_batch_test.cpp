// How batches are cut, and that nothing but memory depends on it.
#include "titanium/base/error.h"
#include "titanium/engine/cut.h"
#include "titanium/engine/test_engine.h"
#include "titanium/loss/policy_loss.h"

namespace titanium {
namespace {

MicroBatching fixed(int64_t sequences) {
  MicroBatching micro;
  micro.sequences = sequences;
  return micro;
}
MicroBatching dynamic(int64_t tokens, int64_t divisor = 1) {
  MicroBatching micro;
  micro.max_tokens = tokens;
  micro.count_divisor = divisor;
  return micro;
}
MicroBatching given(Groups groups) {
  MicroBatching micro;
  micro.given = std::move(groups);
  return micro;
}

double difference(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}

// Sequences of 8 different lengths, each with a trained token.
std::vector<Sample> eight() {
  return test_samples({3, 4, 5, 6, 7, 8, 9, 10}, 3);
}

TEST(EngineBatch, OutputsComeInInputOrderAndLength) {
  TestEngine engine(engine_json("llama3"));
  const std::vector<Sample> samples = test_samples({9, 2, 17, 5, 30, 1, 8, 8, 3, 21, 4, 13, 2, 26, 6, 11}, 5);
  EngineBatch batch = test_batch(samples);
  batch.calculate_entropy = batch.calculate_sum_pi_squared = true;
  batch.micro = dynamic(40);
  const EngineOutput all = engine->infer_batch(batch);
  ASSERT_EQ(all.model_output.size(), 3u);
  for (const auto& [name, rows] : all.model_output) {
    ASSERT_EQ(rows.rows(), 16) << name;
    ASSERT_EQ(rows.values.scalar_type(), at::kFloat);
    for (int64_t i = 0; i < 16; ++i) {
      EngineBatch one = test_batch({samples[static_cast<size_t>(i)]});
      one.calculate_entropy = one.calculate_sum_pi_squared = true;
      const at::Tensor row = rows.row(i), alone = engine->forward_step(one).model_output.at(name).row(0);
      ASSERT_EQ(row.numel(), samples[static_cast<size_t>(i)].size());
      EXPECT_LT(difference(row, alone), 1e-5) << name << " of sample " << i;
      EXPECT_EQ(row[-1].item<float>(), 0);  // nothing follows the last token
    }
  }
  EXPECT_LT(all.model_output.at("log_probs").row(4)[0].item<float>(), 0);
}

TEST(EngineBatch, TheTokenBudgetIsNeverExceeded) {
  TestEngine engine(engine_json("llama3"));
  EngineBatch batch = test_batch(test_samples({7, 7, 7, 7, 7, 7, 7, 7}));
  batch.micro = dynamic(8);
  const SftLoss loss;
  EXPECT_EQ(engine->infer_batch(batch, &loss).loss.size(), 8u);
  batch.micro = dynamic(14);
  EXPECT_EQ(engine->infer_batch(batch, &loss).loss.size(), 4u);
  batch.micro = dynamic(28, 3);
  EXPECT_EQ(engine->infer_batch(batch, &loss).loss.size(), 3u);
  batch.samples[3] = test_samples({9})[0];
  batch.micro = dynamic(8);
  EXPECT_EQ(message_of<BadData>([&] { engine->infer_batch(batch); }),
            "sequence 3 of the batch has 9 tokens, more than max_token_len_per_gpu = 8");
}

TEST(EngineBatch, MicroBatchesAreBalancedAndWithinTheBudget) {
  std::vector<WeighedSample> samples;
  for (Sample& sample : test_samples({30, 29, 5, 4, 28, 3, 2, 27, 1, 6})) {
    sample.index = static_cast<int64_t>(samples.size());
    WeighedSample weighed;
    weighed.weight.assign(sample.ids.size(), 0);
    weighed.sample = std::move(sample);
    samples.push_back(std::move(weighed));
  }
  const auto batches = cut(samples, dynamic(36), {}, false);
  ASSERT_EQ(batches.size(), 4u);
  int64_t documents = 0;
  for (const PackedBatch& batch : batches) {
    EXPECT_LE(batch.size(), 36);
    EXPECT_GE(batch.size(), 31);
    documents += batch.documents();
  }
  EXPECT_EQ(documents, 10);
}

TEST(EngineBatch, EverySplitHasTheSameLossMetricsAndGradients) {
  TestEngine engine(engine_json("llama3", "float64"));
  const std::vector<MicroBatching> splits = {
      fixed(8),    fixed(1),    fixed(2),        fixed(4),
      dynamic(10), dynamic(23), dynamic(100, 3), given({{7, 0}, {3}, {1, 2, 6, 4}, {5}})};
  for (const Averaging mode : {Averaging::kTokenMean, Averaging::kSeqMeanTokenSum,
                               Averaging::kSeqMeanTokenMean, Averaging::kSeqMeanTokenSumNorm}) {
    const SftLoss loss(mode, 5);
    double first_loss = 0;
    at::Tensor first;
    Reports metrics;
    for (const MicroBatching& micro : splits) {
      auto scope = engine->train_mode();
      EngineBatch batch = test_batch(eight());
      batch.micro = micro;
      const EngineOutput out = engine->forward_backward_batch(batch, &loss, false);
      const at::Tensor gradients = all_gradients(*engine);
      if (!first.defined()) {
        first = gradients.clone();
        first_loss = total(out);
        metrics = out.metrics;
        EXPECT_GT(first.abs().max().item<double>(), 1e-3);
      }
      EXPECT_NEAR(total(out), first_loss, 1e-12 * std::abs(first_loss));
      EXPECT_LT(difference(gradients, first), 1e-12);
      ASSERT_EQ(out.metrics.size(), metrics.size());
      for (const auto& [name, report] : out.metrics)
        EXPECT_NEAR(report.value(), metrics.at(name).value(), 1e-12);
    }
  }
}

TEST(EngineBatch, TheGlobalCountsMayBeGiven) {
  TestEngine engine(engine_json("llama3", "float64"));
  const SftLoss loss;
  EngineBatch batch = test_batch(eight());
  const Counts all = count(batch.samples);
  const double whole = total(engine->infer_batch(batch, &loss));
  batch.counts = all;
  batch.counts->tokens *= 4;
  EXPECT_NEAR(total(engine->infer_batch(batch, &loss)), whole / 4, 1e-12);
  batch.counts->tokens = all.tokens - 1;
  EXPECT_THROW(engine->infer_batch(batch, &loss), BadData);

  // A mean over all rows has a row that does not train in its denominator.
  batch.samples[2].loss_mask.assign(batch.samples[2].ids.size(), 0);
  batch.counts = count(batch.samples);
  EXPECT_EQ(batch.counts->untrained, 1);
  EXPECT_GT(total(engine->infer_batch(batch, &loss)), 0);
  batch.counts->untrained = 0;
  EXPECT_NE(message_of<BadData>([&] { engine->infer_batch(batch, &loss); })
                .find("in 7 sequences and 0 sequences without any;"),
            std::string::npos);
  batch.counts->sequences = 8;  // as verl counts them
  EXPECT_GT(total(engine->infer_batch(batch, &loss)), 0);
}

// Two halves with the counts of both, accumulated, are the whole.
TEST(EngineBatch, SeveralCallsAccumulate) {
  TestEngine engine(engine_json("llama3", "float64"));
  const SftLoss loss;
  auto scope = engine->train_mode();
  const std::vector<Sample> samples = eight();
  engine->forward_backward_batch(test_batch(samples), &loss, false);
  const at::Tensor whole = all_gradients(*engine).clone();
  engine->optimizer_zero_grad();
  EXPECT_EQ(all_gradients(*engine).abs().max().item<double>(), 0);
  for (const auto& half : {std::vector<Sample>(samples.begin(), samples.begin() + 3),
                           std::vector<Sample>(samples.begin() + 3, samples.end())}) {
    EngineBatch batch = test_batch(half);
    batch.counts = count(samples);
    engine->forward_backward_batch(batch, &loss, false);
  }
  EXPECT_LT(difference(all_gradients(*engine), whole), 1e-12);
}

TEST(EngineBatch, TemperatureOfTheBatchOrOfEachRow) {
  TestEngine engine(engine_json("llama3"));
  EngineBatch batch = test_batch(eight());
  const at::Tensor plain = engine->infer_batch(batch).model_output.at("log_probs").values;
  batch.temperature = 0.6;
  const Jagged by_batch = engine->infer_batch(batch).model_output.at("log_probs");
  EXPECT_GT(difference(by_batch.values, plain), 0.1);
  batch.temperature.reset();
  for (Sample& sample : batch.samples) sample.temperature = 0.6;
  EXPECT_TRUE(engine->infer_batch(batch).model_output.at("log_probs").values.equal(by_batch.values));
  for (size_t i = 1; i < 8; i += 2) batch.samples[i].temperature = 1;
  const Jagged mixed = engine->infer_batch(batch).model_output.at("log_probs");
  EXPECT_LT(difference(mixed.row(2), by_batch.row(2)), 1e-6);
  EXPECT_LT(difference(mixed.row(3), plain.narrow(0, mixed.offsets[3], mixed.row(3).numel())), 1e-6);
  batch.temperature = 0;
  EXPECT_THROW(engine->infer_batch(batch), BadData);
}

// Log-probs from one cut, the update in another, temperature on both sides: the ratio is 1.
TEST(EngineBatch, TheOnPolicyRatioIsOneWhateverTheMicroBatches) {
  TestEngine engine(engine_json("qwen3"));
  const PolicyLoss policy{PolicyLossConfig()};
  for (const MicroBatching& update :
       {fixed(1), fixed(8), dynamic(25), given({{7, 0}, {3}, {1, 2, 6, 4}, {5}})}) {
    EngineBatch batch = test_batch(eight());
    batch.temperature = 0.7;
    batch.micro = dynamic(12);
    const Jagged old = engine->infer_batch(batch).model_output.at("log_probs");
    for (size_t i = 0; i < 8; ++i) {
      std::vector<double>& column = batch.samples[i].columns["old_log_probs"];
      column.push_back(0);
      const at::Tensor row = old.row(static_cast<int64_t>(i));
      for (int64_t t = 0; t + 1 < row.numel(); ++t) column.push_back(row[t].item<double>());
    }
    batch.micro = update;
    double worst = 0, sum = 0, tokens = 0, clipped = 0;
    const ExternalLoss loss([&](const TokenStats& now, const PackedBatch& packed) {
      for (int64_t t = 0; t < packed.size(); ++t) {
        const auto i = static_cast<size_t>(t);
        if (packed.weight[i] == 0) continue;
        const double ratio = std::exp(now.logprob[t].item<double>() - packed.columns.at("old_log_probs")[i]);
        worst = std::max(worst, std::abs(ratio - 1));
        sum += ratio;
        tokens += 1;
        clipped += ratio < 0.8 || ratio > 1.2;
      }
      return ExternalAnswer{0, {at::ones_like(now.logprob), {}, {}, {}}, {}};
    });
    auto scope = engine->train_mode();
    engine->forward_backward_batch(batch, &loss, false);
    EXPECT_EQ(tokens, count(batch.samples).tokens);
    EXPECT_LT(worst, 1e-5);
    EXPECT_NEAR(sum / tokens, 1, 1e-5);
    EXPECT_EQ(clipped, 0);

    // The built-in loss says so too.
    for (Sample& sample : batch.samples) sample.columns["advantages"].assign(sample.ids.size(), 1);
    const EngineOutput out = engine->forward_backward_batch(batch, &policy, false);
    EXPECT_EQ(out.metrics.at("actor/pg_clipfrac").value(), 0);
    EXPECT_EQ(out.metrics.at("actor/pg_clipfrac").count, tokens);
    EXPECT_LT(std::abs(out.metrics.at("actor/ppo_kl").value()), 1e-5);
    EXPECT_NEAR(total(out), -1, 1e-5);
  }
}

TEST(EngineBatch, NothingToTrainOnBehaves) {
  TestEngine engine(engine_json("llama3"));
  const SftLoss sft;
  auto scope = engine->train_mode();

  const EngineOutput none = engine->forward_backward_batch(EngineBatch(), &sft, false);
  EXPECT_TRUE(none.loss.empty());
  const EngineOutput nothing = engine->infer_batch(EngineBatch());
  EXPECT_EQ(nothing.model_output.at("log_probs").rows(), 0);
  EXPECT_EQ(nothing.model_output.at("log_probs").values.numel(), 0);
  EXPECT_EQ(engine->forward_step(EngineBatch()).model_output.at("log_probs").rows(), 0);

  // Every token masked, and sequences of one token: the loss is 0, and so is every gradient.
  EngineBatch masked = test_batch(test_samples({4, 1, 6, 1}));
  for (Sample& sample : masked.samples) sample.loss_mask.assign(sample.ids.size(), 0);
  masked.samples[1].loss_mask = {1};  // a first token that nothing predicts
  masked.micro = fixed(1);
  const at::Tensor before = all_masters(*engine).clone();
  const EngineOutput out = engine->forward_backward_batch(masked, &sft, false);
  for (const double loss : out.loss) EXPECT_EQ(loss, 0);
  EXPECT_EQ(all_gradients(*engine).abs().max().item<double>(), 0);
  EXPECT_EQ(engine->optimizer_step(), 0);  // an update with zero gradients, as in torch: decay alone
  const ParamGroup& group = engine->param_groups()[0];
  const at::Tensor decayed = before * (1 - group.lr * group.weight_decay);
  EXPECT_TRUE(at::allclose(all_masters(*engine), decayed, /*rtol=*/2e-7, /*atol=*/0));  // fp32's rounding
  EXPECT_GT(difference(all_masters(*engine), before), 1e-6);

  // A masked micro-batch among others changes nothing.
  engine->optimizer_zero_grad();
  EngineBatch plain = test_batch(eight());
  engine->forward_backward_batch(plain, &sft, false);
  const at::Tensor want = all_gradients(*engine).clone();
  engine->optimizer_zero_grad();
  plain.samples.push_back(masked.samples[0]);
  plain.micro = given({{0, 1, 2, 3, 4, 5, 6, 7}, {8}});
  engine->forward_backward_batch(plain, &sft, false);
  EXPECT_LT(difference(all_gradients(*engine), want), 1e-6);
}

TEST(EngineBatch, StatisticsOfATrainingCallComeBackWhenAsked) {
  TestEngine engine(engine_json("llama3"));
  const SftLoss loss;
  EngineBatch batch = test_batch(eight());
  batch.calculate_entropy = true;
  const EngineOutput inferred = engine->infer_batch(batch);
  auto scope = engine->train_mode();
  EXPECT_TRUE(engine->forward_backward_batch(batch, &loss, false).model_output.empty());
  const at::Tensor without = all_gradients(*engine).clone();
  engine->optimizer_zero_grad();
  batch.return_model_output = true;
  const EngineOutput trained = engine->forward_backward_batch(batch, &loss, false);
  for (const auto& [name, rows] : inferred.model_output)
    EXPECT_LT(difference(trained.model_output.at(name).values, rows.values), 1e-5) << name;
  EXPECT_LT(difference(all_gradients(*engine), without), 1e-6);
}

TEST(EngineBatch, WhatDoesNotFitIsRefusedAndNamed) {
  Json json = engine_json("llama3");
  json["engine"]["max_seq_len"] = 12;
  TestEngine engine(json);
  const auto refused = [&](EngineBatch batch) {
    return message_of<BadData>([&] { engine->infer_batch(batch); });
  };
  EngineBatch batch = test_batch(eight());
  batch.samples[2].ids[3] = 320;
  EXPECT_EQ(refused(batch), "sample 2: token 3 has id 320; the model's ids are 0 to 319");
  batch.samples[2].ids[3] = -1;
  EXPECT_EQ(refused(batch), "sample 2: token 3 has id -1; the model's ids are 0 to 319");
  EXPECT_EQ(refused(test_batch(test_samples({3, 13}))),
            "sample 1 has 13 tokens, more than engine.max_seq_len = 12");
  batch = test_batch(eight());
  batch.samples[1].loss_mask.pop_back();
  EXPECT_NE(refused(batch).find("sample 1"), std::string::npos);
  EXPECT_NE(refused(test_batch(test_samples({3, 0}))).find("empty"), std::string::npos);
  batch = test_batch(eight());
  batch.micro = fixed(3);
  EXPECT_EQ(refused(batch), "the batch has 8 samples, which micro_batch_size_per_gpu = 3 does not divide");
  batch.micro = given({{0, 1, 2}, {3, 4, 5, 6}});
  EXPECT_EQ(refused(batch), "sample 7 is given to no micro-batch");
  batch.micro = given({{0, 1, 2}, {2, 3, 4, 5, 6, 7}});
  EXPECT_EQ(refused(batch), "sample 2 is given to two micro-batches");
  batch.micro = given({{0, 8}});
  EXPECT_EQ(refused(batch), "a micro-batch names sample 8; the batch has 8");
  batch.micro = fixed(2);
  batch.micro.max_tokens = 5;
  EXPECT_THROW(engine->infer_batch(batch), BadConfig);
  EXPECT_EQ(total(engine->infer_batch(test_batch(eight()))), 0);  // and the engine lives on
}

TEST(EngineBatch, TheConfigCutsWhatTheBatchDoesNot) {
  EngineRunConfig config;
  EXPECT_THROW(resolve({}, config, false), BadConfig);
  config.max_token_len_per_gpu = 10;
  config.micro_batch_size_per_gpu = 2;
  EXPECT_EQ(resolve({}, config, false).max_tokens, 10);
  EXPECT_EQ(resolve({}, config, true).max_tokens, 10);
  config.infer_max_token_len_per_gpu = 20;
  config.infer_micro_batch_size_per_gpu = 4;
  EXPECT_EQ(resolve({}, config, false).max_tokens, 10);
  EXPECT_EQ(resolve({}, config, true).max_tokens, 20);
  EXPECT_EQ(resolve(fixed(3), config, true).sequences, 3);
  EXPECT_EQ(resolve(fixed(3), config, true).max_tokens, 0);
  config.use_dynamic_bsz = false;
  EXPECT_EQ(resolve({}, config, false).sequences, 2);
  EXPECT_EQ(resolve({}, config, true).sequences, 4);
}

TEST(EngineBatch, GroupsStayTogetherWhereTheLossAsks) {
  TestEngine engine(engine_json("llama3"));
  EngineBatch batch = test_batch(eight());
  for (size_t i = 0; i < 8; ++i) batch.samples[i].group = static_cast<int64_t>(i % 4);
  batch.micro = dynamic(20);
  std::vector<std::vector<int64_t>> seen;
  const ExternalLoss loss(
      [&](const TokenStats&, const PackedBatch& packed) {
        seen.push_back(packed.group);
        return ExternalAnswer{};
      },
      {}, Granularity::kGroup);
  engine->infer_batch(batch, &loss);
  EXPECT_GT(seen.size(), 1u);
  for (std::vector<int64_t> groups : seen) {
    std::sort(groups.begin(), groups.end());
    for (size_t i = 0; i + 1 < groups.size(); i += 2) EXPECT_EQ(groups[i], groups[i + 1]);
  }
  batch.micro = fixed(1);
  EXPECT_THROW(engine->infer_batch(batch, &loss), BadData);
}

}  // namespace
}  // namespace titanium
