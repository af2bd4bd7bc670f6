#include "titanium/loss/preference.h"

#include "titanium/base/error.h"
#include "titanium/loss/fixtures_test.h"
#include "titanium/loss/policy_loss.h"
#include "titanium/loss/sft.h"
#include "titanium/ops/test_handle.h"

namespace titanium::rl {
namespace {

// ---- DPO: rows of chosen, then rows of rejected

struct Pairs {
  int64_t P = 0, T = 0;
  std::vector<WeighedSample> samples;
  Column logprob;  // [2 P, T]
};

Column joined(Column a, const Column& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Pairs pairs_of(const Case& c) {
  Pairs pairs;
  pairs.P = c.shape("chosen_logps")[0];
  pairs.T = c.shape("chosen_logps")[1];
  Grid grid{2 * pairs.P, pairs.T, c.mask("chosen_mask"), {}};
  const auto rejected = c.mask("rejected_mask");
  grid.mask.insert(grid.mask.end(), rejected.begin(), rejected.end());
  grid.columns["ref_log_prob"] = joined(c.input("ref_chosen_logps"), c.input("ref_rejected_logps"));
  pairs.logprob = joined(c.input("chosen_logps"), c.input("rejected_logps"));
  auto samples = samples_of(grid);
  for (int64_t i = 0; i < 2 * pairs.P; ++i) {
    samples[static_cast<size_t>(i)].group = i % pairs.P;
    samples[static_cast<size_t>(i)].seq_columns["chosen"] = i < pairs.P;
  }
  const Counts counts = count(samples);
  pairs.samples = weigh_all(samples, Averaging::kTokenMean, counts);
  return pairs;
}

DpoLoss dpo_of(const Case& c) {
  return DpoLoss({c.params().at("beta"), c.params().at("label_smoothing"), c.params().at("use_reference")});
}

double mean_of(const Case& c, const char* name) {
  const Column values = c.expected().at(name).at("data").get<Column>();
  double total = 0;
  for (double x : values) total += x;
  return total / static_cast<double>(values.size());
}

TEST(DpoLoss, EveryCaseOfTheFixtures) {
  int seen = 0;
  for (const Case& c : cases("dpo")) {
    const Pairs pairs = pairs_of(c);
    TokenStats now;
    now.logprob = statistic(pairs.logprob, 2 * pairs.P, pairs.T, c.dtype());
    const LossSum sum = dpo_of(c)(now, batch_of(pairs.samples));
    expect_value(sum.loss.item<double>(), c, "loss");
    const Column g = rows_back(gradient(sum.loss, now.logprob), 2 * pairs.P, pairs.T);
    const auto half = g.begin() + pairs.P * pairs.T;
    expect_values(Column(g.begin(), half), c, "grad_chosen_logps");
    expect_values(Column(half, g.end()), c, "grad_rejected_logps");
    expect_close(sum.reports.at("rewards/chosen").value(), mean_of(c, "reward_chosen"), c.fp64, "chosen");
    expect_close(sum.reports.at("rewards/rejected").value(), mean_of(c, "reward_rejected"), c.fp64,
                 "rejected");
    expect_close(sum.reports.at("rewards/margins").value(), c.expected().at("margin"), c.fp64, "margin");
    expect_close(sum.reports.at("rewards/accuracies").value(), c.expected().at("accuracy"), c.fp64,
                 "accuracy");
    ++seen;
  }
  EXPECT_EQ(seen, 2 * 8);
}

// One micro-batch, or one a pair: the packer keeps pairs together.
TEST(DpoLoss, IsTheSameForEverySplitThatKeepsPairs) {
  for (const Case& c : cases("dpo")) {
    if (!c.fp64) continue;
    const Pairs pairs = pairs_of(c);
    PackOptions options;
    options.keep_groups = true;
    options.split.budget = 2 * (pairs.T + 1);
    const auto batches = pack(pairs.samples, options);
    ASSERT_EQ(static_cast<int64_t>(batches.size()), pairs.P);
    const auto evaluate = [&](const PackedBatch& batch) {
      Column logprob;
      for (int64_t sample : batch.sample) {
        const auto at = pairs.logprob.begin() + sample * pairs.T;
        logprob.insert(logprob.end(), at, at + pairs.T);
      }
      TokenStats now;
      now.logprob = statistic(logprob, batch.documents(), pairs.T, at::kDouble);
      return dpo_of(c)(now, batch);
    };
    const LossSum whole = evaluate(batch_of(pairs.samples));
    double loss = 0;
    Reports reports;
    for (const PackedBatch& batch : batches) {
      const LossSum one = evaluate(batch);
      loss += one.loss.item<double>();
      add_reports(reports, one.reports);
    }
    EXPECT_NEAR(loss, whole.loss.item<double>(), 1e-13);
    for (const auto& [name, report] : whole.reports) {
      EXPECT_NEAR(reports.at(name).value(), report.value(), 1e-13) << name;
    }
  }
}

TEST(DpoLoss, WhatIsNoPairIsRefused) {
  const Case c = cases("dpo")[0];
  const auto refused = [&](const auto& change) {
    Pairs pairs = pairs_of(c);
    change(pairs.samples);
    TokenStats now;
    now.logprob = statistic(pairs.logprob, 2 * pairs.P, pairs.T, at::kDouble);
    EXPECT_THROW(DpoLoss()(now, batch_of(pairs.samples)), BadData);
  };
  refused([](auto& s) { s[0].sample.group = -1; });
  refused([](auto& s) { s[0].sample.group = 1; });
  refused([](auto& s) { s[0].sample.seq_columns["chosen"] = 0; });
  refused([](auto& s) { s[0].sample.seq_columns["chosen"] = 0.5; });
  refused([](auto& s) {
    for (auto& w : s) w.sample.seq_columns.clear();
  });
  refused([](auto& s) {
    for (auto& w : s) w.sample.columns.clear();
  });
  EXPECT_THROW(DpoLoss({.beta = 0}), BadConfig);
  EXPECT_THROW(DpoLoss({.label_smoothing = 0.6}), BadConfig);
  EXPECT_THROW(RewardModelLoss({.center_rewards_coefficient = -1}), BadConfig);
}

// ---- reward model: two tokens a sample, the reward is the value after the second

TEST(RewardModelLoss, EveryCaseOfTheFixtures) {
  int seen = 0;
  for (const Case& c : cases("reward_model")) {
    const int64_t P = c.shape("chosen_rewards")[0];
    Grid grid{2 * P, 1, std::vector<uint8_t>(static_cast<size_t>(2 * P), 1), {}};
    auto samples = samples_of(grid);
    const Column margin = c.input("margin");
    for (int64_t i = 0; i < 2 * P; ++i) {
      auto& s = samples[static_cast<size_t>(i)];
      s.group = i % P;
      s.seq_columns = {{"chosen", i < P}, {"margin", margin[static_cast<size_t>(i % P)]}};
    }
    const Counts counts = count(samples);
    const PackedBatch batch = batch_of(weigh_all(samples, Averaging::kTokenMean, counts));
    at::Tensor value = at::zeros({2 * P, 2}, at::kDouble);
    value.select(1, 1).copy_(at::tensor(
        at::ArrayRef<double>(joined(c.input("chosen_rewards"), c.input("rejected_rewards"))), at::kDouble));
    TokenStats now;
    now.value = value.flatten().to(c.dtype()).clone().requires_grad_();
    const RewardModelLoss loss({c.params().at("use_margin"), c.params().at("center_rewards_coefficient")});
    const LossSum sum = loss(now, batch);
    expect_value(sum.loss.item<double>(), c, "loss");
    const at::Tensor g =
        gradient(sum.loss, now.value).to(at::kDouble).view({2 * P, 2}).select(1, 1).contiguous();
    const double* at = g.const_data_ptr<double>();
    expect_values(Column(at, at + P), c, "grad_chosen");
    expect_values(Column(at + P, at + 2 * P), c, "grad_rejected");
    expect_close(sum.reports.at("reward_model/accuracy").value(), c.expected().at("accuracy"), c.fp64,
                 "accuracy");
    ++seen;
  }
  EXPECT_EQ(seen, 2 * 4);
}

// ---- through the head: with the identity as its matrix, hidden states are logits

at::Tensor logits_of(const Case& c, int64_t V) {
  return at::tensor(at::ArrayRef<double>(c.input("logits")), at::kDouble)
      .view({-1, V})
      .to(c.dtype())
      .requires_grad_();
}
Column numbers(const at::Tensor& t) {
  const at::Tensor flat = t.detach().to(at::kDouble).contiguous().flatten();
  return Column(flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel());
}

TEST(SftLoss, EveryCaseOfTheFixtures) {
  for (const Case& c : cases("sft")) {
    const int64_t V = c.shape("logits")[1];
    const Column ids = c.input("input_ids"), mask = c.input("token_mask"), bounds = c.input("cu_seqlens");
    std::vector<Sample> samples;
    for (size_t d = 0; d + 1 < bounds.size(); ++d) {
      Sample s;
      s.index = static_cast<int64_t>(d);
      s.ids.assign(ids.begin() + static_cast<int64_t>(bounds[d]),
                   ids.begin() + static_cast<int64_t>(bounds[d + 1]));
      s.loss_mask.assign(mask.begin() + static_cast<int64_t>(bounds[d]),
                         mask.begin() + static_cast<int64_t>(bounds[d + 1]));
      samples.push_back(std::move(s));
    }
    const PackedBatch batch = batch_of(weigh_all(samples, Averaging::kTokenMean, counts_of(c, samples)));
    const TestHandle identity(at::eye(V, at::TensorOptions().dtype(c.dtype())));
    const at::Tensor x = logits_of(c, V), labels = at::tensor(at::ArrayRef<int64_t>(batch.labels), at::kLong);
    const TokenStats now = linear_logprob(x, identity, labels);
    const LossSum sum = SftLoss()(now, batch);
    expect_value(sum.loss.item<double>() * dp_size(c), c, "loss");
    expect_values(numbers(gradient(sum.loss, x) * dp_size(c)), c, "grad_logits");
    std::vector<uint8_t> trained;
    for (double w : batch.weight) trained.push_back(w != 0);
    expect_values(numbers(now.logprob), c, "log_prob", trained);
    // The head that forms loss and gradient at once.
    const at::Tensor weights = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble).to(c.dtype());
    const at::Tensor nll = weighted_nll(x, identity, labels, weights).loss;
    expect_value(nll.item<double>() * dp_size(c), c, "loss");
    expect_values(numbers(gradient(nll, x) * dp_size(c)), c, "grad_logits");
  }
}

TEST(Entropy, EveryCaseOfTheFixtures) {
  for (const Case& c : cases("entropy")) {
    const auto shape = c.shape("logits");
    const TestHandle identity(at::eye(shape[2], at::TensorOptions().dtype(c.dtype())));
    const at::Tensor x = logits_of(c, shape[2]);
    if (c.has("labels")) {
      const at::Tensor labels =
          at::tensor(at::ArrayRef<double>(c.input("labels")), at::kDouble).to(at::kLong);
      const at::Tensor temperature =
          at::full({x.size(0)}, c.params().at("temperature").get<double>(), c.dtype());
      const TokenStats now = linear_logprob(x, identity, labels, temperature, {}, {true, true});
      expect_values(numbers(now.logprob), c, "log_prob");
      expect_values(numbers(now.entropy), c, "entropy");
      expect_values(numbers(now.sum_pi_squared), c, "sum_pi_squared");
      continue;
    }
    // The bonus of the actor's loss alone: advantages 0, coefficient -1.
    Grid grid{shape[0], shape[1], c.mask("response_mask"), {}};
    grid.columns["old_log_probs"] = grid.columns["advantages"] = Column(grid.mask.size(), 0);
    PolicyLossConfig config;
    config.entropy_coeff = -1;
    config.loss_agg_mode = c.params().at("loss_agg_mode");
    const PolicyLoss loss(config);
    const auto samples = samples_of(grid);
    const PackedBatch batch = batch_of(weigh_all(samples, loss.averaging(), count(samples)));
    const at::Tensor labels = at::zeros({x.size(0)}, at::kLong);
    const TokenStats head = linear_logprob(x, identity, labels, {}, {}, loss.wants());
    expect_values(numbers(head.entropy), c, "token_entropy");
    const auto as_batch = [&](const at::Tensor& t) {
      return at::cat({t.view({shape[0], shape[1]}), at::zeros({shape[0], 1}, t.options())}, 1).flatten();
    };
    const LossSum sum = loss({as_batch(head.logprob), as_batch(head.entropy), {}}, batch);
    expect_value(sum.loss.item<double>(), c, "entropy_loss");
    expect_value(sum.reports.at("actor/entropy_loss").value(), c, "entropy_loss");
    expect_values(numbers(gradient(sum.loss, x)), c, "grad_logits");
  }
}

}  // namespace
}  // namespace titanium::rl
