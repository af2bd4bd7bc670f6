// Three PPO updates of a tiny model against transformers and verl's formulas (tests/data/engine/make_ppo.py),
// by a loss of the caller's own and by the built-in one.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "titanium/engine/test_engine.h"
#include "titanium/loss/policy_loss.h"

namespace titanium {
namespace {

struct Reference {
  Json json = read_json(TITANIUM_SOURCE_DIR "/tests/data/engine/ppo.json");
  const Json& settings = json.at("settings");
  double setting(const char* name) const { return settings.at(name).get<double>(); }

  EngineBatch batch() const {
    EngineBatch out;
    out.temperature = setting("temperature");
    const Json& given = json.at("given");
    for (size_t i = 0; i < given.at("ids").size(); ++i) {
      Sample sample;
      sample.ids = given.at("ids")[i].get<std::vector<int32_t>>();
      sample.loss_mask = given.at("mask")[i].get<std::vector<uint8_t>>();
      for (const char* name : {"old_log_probs", "ref_log_prob", "advantages"})
        sample.columns[name] = given.at(name)[i].get<std::vector<double>>();
      out.samples.push_back(std::move(sample));
    }
    return out;
  }
  Json engine(const std::string& dtype) const {
    Json out = engine_json("llama3", dtype);
    out["optimizer"] = Json::object();
    for (const char* key : {"lr", "betas", "eps", "weight_decay", "clip_grad"})
      out["optimizer"][key] = settings.at(key);
    return out;
  }
};

// verl's PPO with an entropy bonus and a KL term, as a trainer writes it: on plain tensors, by autograd.
ExternalAnswer ppo(const Reference& r, const TokenStats& now, const PackedBatch& batch) {
  const at::AutoGradMode grad(true);
  const auto column = [](const std::vector<double>& values) {
    return at::tensor(at::ArrayRef<double>(values), at::kDouble);
  };
  const at::Tensor logprob = now.logprob.to(at::kDouble).detach().requires_grad_();
  const at::Tensor entropy = now.entropy.to(at::kDouble).detach().requires_grad_();
  const at::Tensor weight = column(batch.weight), old = column(batch.columns.at("old_log_probs"));
  const at::Tensor adv = column(batch.columns.at("advantages")),
                   ref = column(batch.columns.at("ref_log_prob"));
  const auto mean = [&](const at::Tensor& x) { return (x * weight).sum(); };
  const at::Tensor d = (logprob - old).clamp(-20, 20), ratio = d.exp();
  const at::Tensor plain = -adv * ratio;
  const at::Tensor clipped = -adv * ratio.clamp(1 - r.setting("clip_low"), 1 + r.setting("clip_high"));
  const at::Tensor larger = at::maximum(plain, clipped), dual = -adv * r.setting("clip_dual");
  const at::Tensor pg = mean(at::where(adv < 0, at::minimum(larger, dual), larger));
  const at::Tensor q = (ref - logprob).clamp(-20, 20);
  const at::Tensor kl = mean((q.exp() - q - 1).clamp(-10, 10));
  const at::Tensor loss = pg - r.setting("entropy_coeff") * mean(entropy) + r.setting("kl_coef") * kl;
  const auto gradients = torch::autograd::grad({loss}, {logprob, entropy});
  ExternalAnswer answer;
  answer.loss = loss.item<double>();
  answer.gradient.logprob = gradients[0].to(now.logprob.scalar_type());
  answer.gradient.entropy = gradients[1].to(now.entropy.scalar_type());
  const auto part = [&](const char* name, const at::Tensor& value) {
    answer.reports[name] = Report::total(value.item<double>());
  };
  part("pg_loss", pg);
  part("kl_loss", kl);
  part("entropy", mean(entropy));
  part("ppo_kl", mean(-d));
  part("pg_clipfrac", mean((clipped > plain).to(at::kDouble)));
  part("pg_clipfrac_lower", mean(((larger > dual) & (adv < 0)).to(at::kDouble)));
  return answer;
}

PolicyLoss built_in(const Reference& r) {
  PolicyLossConfig config;
  config.clip_ratio_low = r.setting("clip_low");
  config.clip_ratio_high = r.setting("clip_high");
  config.clip_ratio_c = r.setting("clip_dual");
  config.entropy_coeff = r.setting("entropy_coeff");
  config.use_kl_loss = true;
  config.kl_loss_coef = r.setting("kl_coef");
  return PolicyLoss(config);
}

// The same three updates, whatever the micro-batches.
void expect_reference(const std::string& dtype, const Loss& loss, int64_t tokens, double tolerance,
                      bool own_names) {
  const Reference r;
  const Json& want = r.json.at(dtype);
  TestEngine engine(r.engine(dtype));
  EngineBatch batch = r.batch();
  batch.micro.max_tokens = tokens;
  double mean_advantage = 0;
  int64_t trained = 0;
  for (const Sample& sample : batch.samples) {
    for (size_t i = 1; i < sample.ids.size(); ++i) {
      if (!sample.loss_mask[i]) continue;
      mean_advantage += std::abs(sample.columns.at("advantages")[i]);
      ++trained;
    }
  }
  mean_advantage /= static_cast<double>(trained);
  for (const Json& step : want.at("steps")) {
    const EngineOutput out = engine->train_batch(batch, loss);
    EXPECT_NEAR(total(out), step.at("loss").get<double>(), tolerance * mean_advantage);
    EXPECT_NEAR(out.metrics.at("grad_norm").value(), step.at("grad_norm").get<double>(),
                10 * tolerance * step.at("grad_norm").get<double>());
    if (!own_names) continue;
    for (const char* name : {"pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "kl_loss"})
      EXPECT_NEAR(out.metrics.at(name).value(), step.at(name).get<double>(), 5 * tolerance) << name;
  }
  const Jagged log_probs = engine->infer_batch(batch).model_output.at("log_probs");
  for (int64_t i = 0; i < log_probs.rows(); ++i) {
    const auto row = want.at("log_probs")[static_cast<size_t>(i)].get<std::vector<double>>();
    for (size_t t = 0; t < row.size(); ++t)
      EXPECT_NEAR(log_probs.row(i)[static_cast<int64_t>(t)].item<double>(), row[t], 100 * tolerance);
  }
  for (const auto& [name, sum] : want.at("abs_sums").items()) {
    const Weight& weight = engine->session().store->weight(name);
    const at::Tensor master = weight.unit().shard().narrow(0, weight.offset(), weight.numel());
    EXPECT_NEAR(master.to(at::kDouble).abs().sum().item<double>(), sum.get<double>(),
                10 * tolerance * sum.get<double>());
  }
}

TEST(Ppo, ALossOfTheCallersOwnGivesTheReference) {
  const Reference r;
  const ExternalLoss loss([&](const TokenStats& now, const PackedBatch& batch) { return ppo(r, now, batch); },
                          {.entropy = true});
  expect_reference("float64", loss, 1000, 1e-9, true);
  expect_reference("float64", loss, 20, 1e-9, true);
  expect_reference("float32", loss, 1000, 1e-5, true);
  expect_reference("float32", loss, 20, 1e-5, true);
}

TEST(Ppo, TheBuiltInLossGivesTheReference) {
  const PolicyLoss loss = built_in(Reference());
  expect_reference("float64", loss, 1000, 1e-9, false);
  expect_reference("float64", loss, 20, 1e-9, false);
  expect_reference("float32", loss, 20, 1e-5, false);
}

TEST(Ppo, ThePolicyMetricsDoNotDependOnTheSplit) {
  const Reference r;
  const PolicyLoss loss = built_in(r);
  TestEngine engine(r.engine("float64"));
  EngineBatch batch = r.batch();
  Reports first;
  for (const int64_t tokens : {1000, 40, 20, 16}) {
    batch.micro.max_tokens = tokens;
    const EngineOutput out = engine->infer_batch(batch, &loss);
    if (first.empty()) first = out.metrics;
    ASSERT_EQ(out.metrics.size(), first.size());
    for (const auto& [name, report] : out.metrics)
      EXPECT_NEAR(report.value(), first.at(name).value(), 1e-12 + 1e-9 * std::abs(first.at(name).value()))
          << name;
  }
  EXPECT_GE(first.size(), 5u);
}

}  // namespace
}  // namespace titanium
