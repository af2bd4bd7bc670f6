// What holds of every loss: the cut does not matter, masked positions do not matter, bad settings are
// refused.
#include <cmath>
#include <functional>
#include <memory>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/loss/external.h"
#include "titanium/loss/fixtures_test.h"
#include "titanium/loss/policy_loss.h"
#include "titanium/loss/policy_terms.h"
#include "titanium/loss/sft.h"
#include "titanium/loss/value_loss.h"

namespace titanium::rl {
namespace {

// Sequences of 1 to 8 answer tokens with a column of everything, and what a head would say of them.
struct Data {
  std::vector<Sample> samples;
  std::vector<Column> logprob, entropy, value;  // [sample][n], entry t for ids[t + 1]
};

Data data(const std::vector<int64_t>& answers, bool holes = true) {
  const Random random(11, Purpose::kTest);
  uint64_t draw = 0;
  Data out;
  for (int64_t n : answers) {
    Sample s;
    s.index = static_cast<int64_t>(out.samples.size());
    const auto size = static_cast<size_t>(n) + 1;
    s.ids.assign(size, 1);
    s.loss_mask.assign(size, 1);
    if (holes && n > 4) s.loss_mask[3] = 0;
    const auto column = [&](double scale, double shift = 0) {
      Column c(size);
      for (double& x : c) x = shift + scale * random.normal(draw++);
      return c;
    };
    for (const char* name : {"old_log_probs", "ref_log_prob"}) s.columns[name] = column(0.4, -1.5);
    for (const char* name : {"advantages", "values", "returns"}) s.columns[name] = column(1);
    s.columns["rollout_is_weights"] = column(0.1, 1);
    out.logprob.push_back(column(0.4, -1.5));
    out.entropy.push_back(column(0.1, 2));
    out.value.push_back(column(1));
    out.samples.push_back(std::move(s));
  }
  return out;
}

struct Result {
  double loss = 0;
  std::vector<Column> by_logprob, by_entropy, by_value;  // [sample][n]
  Reports reports;
};

// The loss over micro-batches of the given samples; counts are those of the whole global batch.
Result evaluate(const Loss& loss, const Data& in, const Groups& split, const Counts& counts,
                int64_t update = 0) {
  const auto weighed = weigh_all(in.samples, loss.averaging(), counts, loss.scale_factor());
  Result result;
  result.by_logprob.resize(in.samples.size());
  result.by_entropy = result.by_value = result.by_logprob;
  for (const auto& members : split) {
    PackedBatch batch = batch_of(weighed, members);
    batch.update = update;
    const auto packed = [&](const std::vector<Column>& rows) {
      Column all;
      for (int64_t i : members)
        all.insert(all.end(), rows[static_cast<size_t>(i)].begin(), rows[static_cast<size_t>(i)].end());
      return at::tensor(at::ArrayRef<double>(all), at::kDouble).requires_grad_();
    };
    const TokenStats now{packed(in.logprob), packed(in.entropy), {}, packed(in.value)};
    const LossSum sum = loss(now, batch);
    result.loss += sum.loss.item<double>();
    add_reports(result.reports, sum.reports);
    const auto grads = torch::autograd::grad({sum.loss}, {now.logprob, now.entropy, now.value}, {},
                                             std::nullopt, false, /*allow_unused=*/true);
    const auto unpacked = [&](size_t which, std::vector<Column>& rows) {
      const at::Tensor g = grads[which].defined() ? grads[which] : at::zeros({batch.size()}, at::kDouble);
      const double* at = g.const_data_ptr<double>();
      for (size_t d = 0; d < members.size(); ++d) {
        rows[static_cast<size_t>(members[d])].assign(at + batch.bounds[d], at + batch.bounds[d + 1]);
      }
    };
    unpacked(0, result.by_logprob);
    unpacked(1, result.by_entropy);
    unpacked(2, result.by_value);
  }
  return result;
}

Result evaluate(const Loss& loss, const Data& in, const Groups& split) {
  return evaluate(loss, in, split, count(in.samples));
}

// The samples of a data rank in the order of its micro-batches, and those micro-batches over them.
Data of_rank(const Data& in, const Groups& split) {
  Data out;
  for (const auto& members : split) {
    for (int64_t i : members) {
      const auto at = static_cast<size_t>(i);
      out.samples.push_back(in.samples[at]);
      out.logprob.push_back(in.logprob[at]);
      out.entropy.push_back(in.entropy[at]);
      out.value.push_back(in.value[at]);
    }
  }
  return out;
}
Groups renumbered(Groups split) {
  int64_t next = 0;
  for (auto& members : split) {
    for (int64_t& i : members) i = next++;
  }
  return split;
}

void expect_same(const Result& a, const Result& b, const std::string& what, double tolerance = 1e-12) {
  EXPECT_NEAR(a.loss, b.loss, tolerance * (1 + std::abs(b.loss))) << what;
  const auto same = [&](const std::vector<Column>& x, const std::vector<Column>& y) {
    ASSERT_EQ(x.size(), y.size());
    for (size_t i = 0; i < x.size(); ++i) {
      ASSERT_EQ(x[i].size(), y[i].size());
      for (size_t t = 0; t < x[i].size(); ++t) EXPECT_NEAR(x[i][t], y[i][t], tolerance) << what;
    }
  };
  same(a.by_logprob, b.by_logprob);
  same(a.by_entropy, b.by_entropy);
  same(a.by_value, b.by_value);
  ASSERT_EQ(a.reports.size(), b.reports.size()) << what;
  for (const auto& [name, report] : b.reports) {
    EXPECT_NEAR(a.reports.at(name).value(), report.value(), tolerance * (1 + std::abs(report.value())))
        << what << " " << name;
  }
}

const Groups kWhole{{0, 1, 2, 3, 4, 5, 6, 7}};
const Groups kSplits[] = {{{0, 1, 2, 3}, {4, 5, 6, 7}},
                          {{0, 7}, {1, 6}, {2, 5}, {3, 4}},
                          {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}},
                          {{6}, {0, 1, 2, 3, 4}, {5, 7}}};
const std::vector<int64_t> kLengths{1, 2, 3, 4, 5, 6, 7, 8};
constexpr const char* kAveragings[] = {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean",
                                       "seq-mean-token-sum-norm", "token-sum"};
constexpr const char* kModes[] = {"vanilla", "gspo",    "sapo",     "gpg",    "dro",      "cispo",
                                  "dppo_tv", "dppo_kl", "clip_cov", "kl_cov", "geo_mean", "bypass_mode"};

PolicyLossConfig config_of(const std::string& mode, const std::string& averaging) {
  PolicyLossConfig config;
  config.policy_loss.loss_mode = mode;
  config.loss_agg_mode = averaging;
  config.loss_scale_factor = 5;
  config.entropy_coeff = 0.01;
  config.use_kl_loss = true;
  config.kl_loss_type = "k3+";
  config.rollout_correction.rollout_is = "token";
  config.rollout_correction.rollout_rs = "seq_mean_k3,token_k1";
  config.rollout_correction.rollout_rs_threshold = "0.4,2";
  return config;
}

// Every loss that may be cut, in every averaging.
std::vector<std::pair<std::string, std::unique_ptr<Loss>>> losses_that_may_be_cut() {
  std::vector<std::pair<std::string, std::unique_ptr<Loss>>> out;
  for (const char* averaging : kAveragings) {
    for (const char* mode : kModes) {
      auto loss = std::make_unique<PolicyLoss>(config_of(mode, averaging));
      if (loss->granularity() == Granularity::kMicroBatch) continue;
      out.emplace_back(std::string(mode) + " " + averaging, std::move(loss));
    }
    out.emplace_back(std::string("value ") + averaging,
                     std::make_unique<ValueLoss>(ValueLossConfig{0.2, averaging, 5.0}));
    out.emplace_back(std::string("sft ") + averaging,
                     std::make_unique<SftLoss>(averaging_from(averaging), 5));
  }
  return out;
}

TEST(Losses, B02_LossGradientAndMetricsDoNotDependOnTheSplit) {
  const Data in = data(kLengths);
  const auto losses = losses_that_may_be_cut();
  EXPECT_EQ(losses.size(), 5u * 12u);
  for (const auto& [name, loss] : losses) {
    const Result whole = evaluate(*loss, in, kWhole);
    EXPECT_NE(whole.loss, 0) << name;
    for (const Groups& split : kSplits) expect_same(evaluate(*loss, in, split), whole, name);
  }
}

// The gradient is the derivative of the value, by central differences: with k3+ it is not, so with k2 here.
TEST(Losses, GradientsAreDerivatives) {
  const Data in = data(kLengths);
  for (const char* mode : {"vanilla", "sapo", "gpg", "dro", "geo_mean", "kl_cov", "clip_cov"}) {
    PolicyLossConfig config = config_of(mode, "seq-mean-token-mean");
    config.kl_loss_type = "k2";
    const PolicyLoss loss(config);
    const Result at = evaluate(loss, in, kWhole);
    for (size_t i = 0; i < in.samples.size(); ++i) {
      Data up = in, down = in;
      const double h = 1e-6;
      up.logprob[i][0] += h;
      down.logprob[i][0] -= h;
      const double slope = (evaluate(loss, up, kWhole).loss - evaluate(loss, down, kWhole).loss) / (2 * h);
      EXPECT_NEAR(at.by_logprob[i][0], slope, 1e-6 * (1 + std::abs(slope))) << mode << " " << i;
    }
  }
}

TEST(Losses, MaskedPositionsHaveNoPartEvenWithGarbage) {
  const Data clean = data(kLengths);
  Data dirty = clean;
  const double garbage[] = {std::nan(""), INFINITY, -INFINITY, 1e300};
  size_t next = 0;
  for (size_t i = 0; i < dirty.samples.size(); ++i) {
    Sample& s = dirty.samples[i];
    for (size_t t = 0; t < s.ids.size(); ++t) {
      const bool predicts = t + 1 < s.ids.size() && s.loss_mask[t + 1];
      if (!predicts) {
        for (auto* rows : {&dirty.logprob, &dirty.entropy, &dirty.value}) (*rows)[i][t] = garbage[next++ % 4];
      }
      if (t > 0 && s.loss_mask[t]) continue;
      for (auto& [name, column] : s.columns) column[t] = garbage[next++ % 4];
    }
  }
  for (const char* mode : kModes) {
    const PolicyLoss loss(config_of(mode, "token-mean"));
    const Result a = evaluate(loss, dirty, kWhole), b = evaluate(loss, clean, kWhole);
    expect_same(a, b, mode, 0);
    for (size_t i = 0; i < a.by_logprob.size(); ++i) EXPECT_EQ(a.by_logprob[i].back(), 0) << mode;
  }
  expect_same(evaluate(ValueLoss(), dirty, kWhole), evaluate(ValueLoss(), clean, kWhole), "value", 0);
  expect_same(evaluate(SftLoss(), dirty, kWhole), evaluate(SftLoss(), clean, kWhole), "sft", 0);
}

// Token losses [4] and [1, 1, 1] in two micro-batches: 1.75, not 2.5 and not 0.875.
TEST(Losses, B01_AccumulationIsTheFullBatch) {
  Data in = data({1, 3});
  in.logprob = {{-4, 0}, {-1, -1, -1, 0}};
  const SftLoss loss;
  EXPECT_DOUBLE_EQ(evaluate(loss, in, {{0, 1}}).loss, 1.75);
  EXPECT_DOUBLE_EQ(evaluate(loss, in, {{0}, {1}}).loss, 1.75);
  expect_same(evaluate(loss, in, {{0}, {1}}), evaluate(loss, in, {{0, 1}}), "B01", 0);
}

// Losses [4, -, -] and [1, 1, 1], scale factor 3; the width of the batch plays no part.
TEST(Losses, B04_DrGrpo) {
  Data in = data({1, 3});
  in.logprob = {{-4, 0}, {-1, -1, -1, 0}};
  const auto loss = [&](Averaging averaging, double scale = 0) {
    return evaluate(SftLoss(averaging, scale), in, {{0}, {1}}).loss;
  };
  EXPECT_DOUBLE_EQ(loss(Averaging::kSeqMeanTokenSum), 3.5);
  EXPECT_DOUBLE_EQ(loss(Averaging::kSeqMeanTokenSumNorm, 3), 3.5 / 3);
  EXPECT_DOUBLE_EQ(loss(Averaging::kSeqMeanTokenMean), 2.5);
  for (size_t i = 0; i < 2; ++i) {  // padded to width 8
    Sample& s = in.samples[i];
    s.ids.resize(9, 0);
    s.loss_mask.resize(9, 0);
    in.logprob[i].resize(9, 0);
    in.entropy[i].resize(9, 0);
    in.value[i].resize(9, 0);
    for (auto& [name, column] : s.columns) column.resize(9, 0);
  }
  EXPECT_DOUBLE_EQ(loss(Averaging::kSeqMeanTokenSumNorm, 3), 3.5 / 3);
}

TEST(Losses, B05_NothingToTrainOn) {
  Data in = data(kLengths), all_masked = in, without = in;
  for (size_t i : {1, 4}) std::fill(in.samples[i].loss_mask.begin(), in.samples[i].loss_mask.end(), 0);
  for (auto& s : all_masked.samples) std::fill(s.loss_mask.begin(), s.loss_mask.end(), 0);
  const Groups split{{0, 2, 3}, {1, 4}, {5, 6, 7}}, rest{{0, 2, 3}, {5, 6, 7}};
  for (const auto& [name, loss] : losses_that_may_be_cut()) {
    const Result with = evaluate(*loss, in, split), alone = evaluate(*loss, in, rest);
    EXPECT_EQ(with.loss, alone.loss) << name;
    for (size_t i : {0, 2, 3, 5, 6, 7}) EXPECT_EQ(with.by_logprob[i], alone.by_logprob[i]) << name;
    for (size_t i : {1, 4}) {
      for (double g : with.by_logprob[i]) EXPECT_EQ(g, 0) << name;
    }
  }
  for (const char* mode : kModes) {
    const Result none = evaluate(PolicyLoss(config_of(mode, "token-mean")), all_masked, kWhole);
    EXPECT_EQ(none.loss, 0) << mode;
    for (const auto& [report, value] : none.reports)
      EXPECT_TRUE(std::isfinite(value.value())) << mode << report;
    for (const auto& rows : {none.by_logprob, none.by_entropy}) {
      for (const auto& row : rows) {
        for (double g : row) EXPECT_EQ(g, 0) << mode;
      }
    }
  }
  const Result none = evaluate(ValueLoss(), all_masked, kWhole);
  EXPECT_EQ(none.loss, 0);
  for (const auto& [report, value] : none.reports) EXPECT_TRUE(std::isfinite(value.value())) << report;
}

// Two tokens with ratio 5: A = -1 gives 3 by the lower bound, A = +1 gives -1.2.
TEST(Losses, B10_DualClipHoldsForNegativeAdvantagesAlone) {
  Data in = data({2});
  in.samples[0].columns["rollout_is_weights"] = {1, 1, 1};
  in.samples[0].columns["old_log_probs"] = {0, -3, -3};
  in.samples[0].columns["advantages"] = {0, -1, 1};
  in.logprob[0] = {-3 + std::log(5.0), -3 + std::log(5.0), 0};
  const Result out = evaluate(PolicyLoss({}), in, {{0}});
  EXPECT_NEAR(out.loss, 0.9, 1e-12);
  EXPECT_DOUBLE_EQ(out.reports.at("actor/pg_clipfrac").value(), 0.5);
  EXPECT_DOUBLE_EQ(out.reports.at("actor/pg_clipfrac_lower").value(), 0.5);
  EXPECT_EQ(out.by_logprob[0], (Column{0, 0, 0}));
}

TEST(Losses, OnThePolicyTheRatioIsOne) {
  Data in = data(kLengths);
  for (size_t i = 0; i < in.samples.size(); ++i) {
    in.samples[i].columns.erase("rollout_is_weights");
    for (size_t t = 0; t + 1 < in.logprob[i].size(); ++t) {
      in.samples[i].columns["old_log_probs"][t + 1] = in.logprob[i][t];
    }
  }
  const Result out = evaluate(PolicyLoss({}), in, kWhole);
  EXPECT_EQ(out.reports.at("actor/pg_clipfrac").value(), 0);
  EXPECT_EQ(out.reports.at("actor/ppo_kl").value(), 0);
  const double n = static_cast<double>(count(in.samples).tokens);
  for (size_t i = 0; i < in.samples.size(); ++i) {
    for (size_t t = 0; t + 1 < in.logprob[i].size(); ++t) {
      const double A = in.samples[i].loss_mask[t + 1] ? in.samples[i].columns["advantages"][t + 1] : 0;
      EXPECT_NEAR(out.by_logprob[i][t], -A / n, 1e-15);
    }
  }
}

// The global batch dealt to two data ranks by hand: each weighs its own samples with the counts of both and
// cuts them its own way; losses and reports are added up, gradients stay with the samples.
TEST(Losses, ReportsOfDataRanksAddUpToThoseOfTheWholeBatch) {
  const Data in = data(kLengths);
  struct Deal {
    Groups first, second;  // micro-batches of either rank
  };
  const Deal deals[] = {{{{0, 1, 2, 3}}, {{4, 5, 6, 7}}},
                        {{{7, 0}, {5}}, {{1}, {2}, {6, 4, 3}}},
                        {{{3}}, {{0, 1}, {2, 4, 5}, {6, 7}}}};
  for (const auto& [name, loss] : losses_that_may_be_cut()) {
    const Result whole = evaluate(*loss, in, kWhole);
    EXPECT_FALSE(whole.reports.empty() && name.find("sft") == std::string::npos) << name;
    for (const Deal& deal : deals) {
      Counts counts;
      for (const Groups* rank : {&deal.first, &deal.second}) counts += count(of_rank(in, *rank).samples);
      EXPECT_EQ(counts, count(in.samples));
      Result sum;
      sum.by_logprob.resize(in.samples.size());
      sum.by_entropy = sum.by_value = sum.by_logprob;
      for (const Groups* rank : {&deal.first, &deal.second}) {
        const Data mine = of_rank(in, *rank);
        const Result part = evaluate(*loss, mine, renumbered(*rank), counts);
        sum.loss += part.loss;
        add_reports(sum.reports, part.reports);
        size_t next = 0;
        for (const auto& members : *rank) {
          for (int64_t i : members) {
            const auto at = static_cast<size_t>(i);
            sum.by_logprob[at] = part.by_logprob[next];
            sum.by_entropy[at] = part.by_entropy[next];
            sum.by_value[at] = part.by_value[next++];
          }
        }
      }
      expect_same(sum, whole, name);
    }
  }
}

// Design D5 names the losses whose result depends on the cut; no other may say so of itself.
TEST(Losses, OnlyTheNamedExceptionsDependOnTheCut) {
  for (const char* mode : kModes) {
    const bool named = std::string(mode) == "clip_cov" || std::string(mode) == "kl_cov";
    const PolicyLoss loss(config_of(mode, "token-mean"));
    EXPECT_EQ(loss.granularity() == Granularity::kMicroBatch, named) << mode;
  }
  EXPECT_NE(ValueLoss().granularity(), Granularity::kMicroBatch);
  EXPECT_NE(SftLoss().granularity(), Granularity::kMicroBatch);
}

// clip_cov drops the number that it should, always the same tokens, and others with another seed or at
// another update.  The last bits of a log-prob, which differ between layouts, have no part in it.
TEST(ClipCov, TheDrawIsAFunctionOfSeedAndToken) {
  const Data in = data({40, 40, 40}, false);
  PolicyLossConfig config = config_of("clip_cov", "token-sum");
  config.use_kl_loss = false;
  config.policy_loss.clip_cov_lb = -1;
  config.policy_loss.clip_cov_ub = 1;
  config.policy_loss.clip_cov_ratio = 0.1;
  const Groups whole{{0, 1, 2}}, turned{{2, 0, 1}};
  const Result a = evaluate(PolicyLoss(config), in, whole), b = evaluate(PolicyLoss(config), in, turned);
  EXPECT_NEAR(a.reports.at("actor/pg_clipfrac").value(), 12 / 120.0, 1e-15);
  expect_same(b, a, "order");
  EXPECT_NE(evaluate(PolicyLoss(config), in, whole, count(in.samples), 1).by_logprob, a.by_logprob);
  Data rounded = in;
  for (auto& row : rounded.logprob)
    for (double& logprob : row) logprob *= 1 + 1e-15;
  expect_same(evaluate(PolicyLoss(config), rounded, whole), a, "rounded otherwise");
  config.seed = 1;
  EXPECT_NE(evaluate(PolicyLoss(config), in, whole).by_logprob, a.by_logprob);
}

void refused(const std::function<void(PolicyLossConfig&)>& change, const std::string& named) {
  PolicyLossConfig config;
  change(config);
  try {
    const PolicyLoss loss(config);
    ADD_FAILURE() << "taken: " << named;
  } catch (const BadConfig& e) {
    EXPECT_EQ(std::string(e.what()).find(named), 0u) << e.what();
    EXPECT_NE(std::string(e.what()).find("allowed"), std::string::npos) << e.what();
  }
}

TEST(PolicyLossConfig, BadValuesNameKeyValueAndWhatIsAllowed) {
  refused([](auto& c) { c.clip_ratio_c = 1; }, "clip_ratio_c = 1");
  refused([](auto& c) { c.clip_ratio = -0.1; }, "clip_ratio = -0.1");
  refused([](auto& c) { c.clip_ratio_low = -1; }, "clip_ratio_low = -1");
  refused([](auto& c) { c.clip_ratio_high = std::nan(""); }, "clip_ratio_high = nan");
  refused([](auto& c) { c.loss_agg_mode = "mean"; }, "loss_agg_mode");
  refused([](auto& c) { c.entropy_coeff = INFINITY; }, "entropy_coeff = inf");
  refused([](auto& c) { c.policy_loss.loss_mode = "ppo"; }, "policy_loss.loss_mode = 'ppo'");
  refused([](auto& c) { c.policy_loss.dro_beta = 0; }, "policy_loss.dro_beta = 0");
  refused([](auto& c) { c.policy_loss.clip_cov_ratio = 2; }, "policy_loss.clip_cov_ratio = 2");
  refused([](auto& c) { c.tau_neg = 0; }, "tau_neg = 0");
  refused(
      [](auto& c) {
        c.use_kl_loss = true;
        c.kl_loss_type = "full";
      },
      "kl_loss_type = 'full'");
  refused(
      [](auto& c) {
        c.loss_agg_mode = "seq-mean-token-sum-norm";
        c.loss_scale_factor = 0;
      },
      "loss_scale_factor = 0");
  PolicyLossConfig config;
  config.loss_agg_mode = "seq-mean-token-sum-norm";
  EXPECT_THROW(PolicyLoss{config}, BadConfig);  // never the width of the batch
  EXPECT_THROW(ValueLoss({.cliprange_value = 0, .loss_agg_mode = "token-mean", .loss_scale_factor = {}}),
               BadConfig);
}

TEST(PolicyLoss, AMissingColumnIsNamed) {
  Data in = data({3});
  in.samples[0].columns.erase("advantages");
  try {
    evaluate(PolicyLoss({}), in, {{0}});
    ADD_FAILURE();
  } catch (const BadData& e) {
    EXPECT_NE(std::string(e.what()).find("'advantages'"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("old_log_probs"), std::string::npos) << e.what();
  }
}

// A comparison with nan is false, so that some losses would take it for a number.
TEST(PolicyLoss, AColumnMustBeFiniteWhereATokenIsTrainedOn) {
  for (const double value : {double(NAN), double(INFINITY), -double(INFINITY)}) {
    for (const char* name : {"advantages", "old_log_probs"}) {
      Data in = data({3, 4});
      in.samples[1].columns.at(name)[2] = value;
      for (const char* mode : kModes) {
        try {
          evaluate(PolicyLoss(config_of(mode, "token-mean")), in, {{0, 1}});
          ADD_FAILURE() << mode << ": " << name << " = " << value;
        } catch (const BadData& e) {
          const std::string what = fmt::format("sample 1, token 2: column '{}' is {}", name, value);
          EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
        }
      }
    }
  }
}

TEST(ValueLoss, AStatisticThatTheModelDoesNotGiveIsRefused) {
  const PackedBatch batch = pack_one({}, 4);
  TokenStats now;
  now.logprob = at::zeros({4}, at::kDouble);
  EXPECT_THROW(ValueLoss(ValueLossConfig{})(now, batch), BadConfig);
  std::swap(now.logprob, now.value);
  EXPECT_THROW(PolicyLoss(config_of("vanilla", "token-mean"))(now, batch), BadConfig);
}

TEST(Report, OneMetricHasOneOp) {
  Reports reports = {{"mine", Report::mean(1, 1)}};
  EXPECT_THROW(add_reports(reports, {{"mine", Report::total(1)}}), BadData);
}

// An empty micro-batch is a filler alone, without columns.
TEST(PolicyLoss, AFillerAloneIsNothing) {
  const PackedBatch batch = pack_one({}, 4);
  TokenStats now;
  now.logprob = at::zeros({4}, at::kDouble).requires_grad_();
  const LossSum sum = PolicyLoss({})(now, batch);
  EXPECT_EQ(sum.loss.item<double>(), 0);
  EXPECT_EQ(gradient(sum.loss, now.logprob).abs().sum().item<double>(), 0);
}

// A callable that computes SFT by itself enters as a surrogate with its value and gradients.
TEST(ExternalLoss, HasTheValueAndGradientsOfTheAnswer) {
  const Data in = data(kLengths);
  const ExternalLoss external([](const TokenStats& now, const PackedBatch& batch) {
    EXPECT_FALSE(now.logprob.requires_grad());
    const at::Tensor w = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble);
    ExternalAnswer answer;
    answer.loss = -(now.logprob * w).sum().item<double>();
    answer.gradient.logprob = -w;
    answer.reports["mine"] = Report::total(answer.loss);
    return answer;
  });
  EXPECT_TRUE(external.wants_all_labels());
  Result got = evaluate(external, in, kSplits[1]);
  EXPECT_NEAR(got.reports.at("mine").value(), got.loss, 1e-15);
  got.reports.clear();
  expect_same(got, evaluate(SftLoss(), in, kWhole), "external");
}

TEST(ExternalLoss, AnswersThatDoNotFitAreRefused) {
  const Data in = data({3});
  const auto refused = [&](const std::function<void(ExternalAnswer&)>& set) {
    const ExternalLoss loss([&](const TokenStats&, const PackedBatch&) {
      ExternalAnswer answer;
      set(answer);
      return answer;
    });
    EXPECT_THROW(evaluate(loss, in, {{0}}), BadData);
  };
  refused([](auto& a) { a.gradient.logprob = at::zeros({3}); });
  refused([](auto& a) { a.gradient.sum_pi_squared = at::zeros({4}); });
}

TEST(Report, OtherRanksGetEveryBit) {
  Reports reports = {{"mean", Report::mean(0.1, 3)}, {"a name of some length", Report::of(Report::kStd)}};
  reports["not a number"] = Report::total(std::nan(""));
  reports["a name of some length"].add(1e300);
  const std::string bytes = to_bytes(reports);
  const Reports got = reports_from(bytes);
  ASSERT_EQ(got.size(), 3u);
  EXPECT_EQ(to_bytes(got), bytes);
  EXPECT_EQ(got.at("mean").sum, 0.1);
  EXPECT_EQ(got.at("a name of some length").op, Report::kStd);
  EXPECT_TRUE(reports_from("").empty());
  EXPECT_THROW(reports_from(bytes.substr(0, bytes.size() - 1)), Bug);
  EXPECT_THROW(reports_from(bytes.substr(0, 3)), Bug);
}

TEST(Report, AddsUpWhateverTheSplit) {
  const double values[] = {3, -1, 4, 1, -5, 9, 2.5};
  for (Report::Op op : {Report::kMean, Report::kSum, Report::kMax, Report::kMin, Report::kStd,
                        Report::kSampleStd, Report::kSampleSize}) {
    Report all = Report::of(op);
    for (double x : values) all.add(x);
    for (size_t cut = 0; cut <= 7; ++cut) {
      Report a = Report::of(op), b = Report::of(op);
      for (size_t i = 0; i < 7; ++i) (i < cut ? a : b).add(values[i]);
      a += b;
      EXPECT_NEAR(a.value(), all.value(), 1e-14);
      EXPECT_EQ(a.count, all.count);
    }
    EXPECT_EQ(Report::of(op).value(), 0);
  }
  Report max = Report::of(Report::kMax);
  for (double x : values) max.add(x);
  EXPECT_EQ(max.value(), 9);
  Report deviation = Report::of(Report::kStd);
  for (double x : {1.0, 3.0}) deviation.add(x);
  EXPECT_DOUBLE_EQ(deviation.value(), 1);
  Report mean;
  EXPECT_THROW(mean += max, Bug);
}

}  // namespace
}  // namespace titanium::rl
