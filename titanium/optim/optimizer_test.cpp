#include "titanium/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <gtest/gtest.h>

#include <cstring>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/formats/safetensors.h"
#include "titanium/optim/clip.h"

namespace titanium {
namespace {

at::Tensor tensor(const SafetensorsFile& file, const std::string& name) {
  const TensorView& view = file.at(name);
  at::Tensor out = at::empty(view.shape, view.dtype == Dtype::F64 ? at::kDouble : at::kFloat);
  std::memcpy(out.data_ptr(), view.data, view.nbytes);
  return out;
}

// Weights a, b, c of the toy fixture in one unit.
struct Toy {
  explicit Toy(StoreDtypes dtypes, OptimizerOptions options = {}) {
    table.add("a", {4, 6}, Split::kRows, {}, 0);
    table.add("b", {5}, Split::kWhole, {}, 0);
    table.add("c", {3, 2, 2}, Split::kWhole, {}, 0);
    StoreOptions store_options;
    store_options.dtypes = dtypes;
    store = std::make_unique<ParamStore>(table, 1, store_options);
    optimizer = make_optimizer(*store, options);
  }
  at::Tensor of(const at::Tensor& flat, const std::string& name) {
    const Weight& w = store->weight(name);
    return flat.narrow(0, w.offset(), w.numel()).view(w.shape());
  }
  at::Tensor param(const std::string& name) { return of(store->unit(0).shard(), name); }
  at::Tensor grad(const std::string& name) { return of(store->unit(0).grad_shard(), name); }
  WeightTable table;
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<Optimizer> optimizer;
};

void expect_close(const at::Tensor& got, const at::Tensor& want, double tolerance, const std::string& what) {
  EXPECT_LE((got.to(at::kDouble) - want.to(at::kDouble)).abs().max().item<double>(), tolerance) << what;
}

void run_toy_fixture(at::ScalarType dtype, const std::string& prefix, double tolerance) {
  const SafetensorsFile file(TITANIUM_SOURCE_DIR "/tests/data/optim/adamw_toy.safetensors");
  Toy toy({dtype, dtype, dtype});
  for (const char* name : {"a", "b", "c"}) toy.param(name).copy_(tensor(file, std::string("init.") + name));
  const at::Tensor lr = tensor(file, "lr"), norms = tensor(file, prefix + ".grad_norm");
  for (int step = 0; step < 20; ++step) {
    toy.store->zero_grad();
    for (const char* name : {"a", "b", "c"}) {
      toy.grad(name).copy_(tensor(file, fmt::format("grad.step_{:02}.{}", step, name)));
    }
    const GradNorm norm = grad_norm(*toy.store);
    EXPECT_NEAR(norm.value, norms[step].item<double>(), (dtype == at::kDouble ? 1e-14 : 1e-6) * norm.value);
    toy.optimizer->step({.lr = lr[step].item<double>(), .clip = clip_coefficient(norm.value, 1.0)});
    for (const char* name : {"a", "b", "c"}) {
      const std::string key = fmt::format("{}.param_after_step_{:02}.{}", prefix, step, name);
      expect_close(toy.param(name), tensor(file, key), tolerance, key);
    }
  }
  for (const char* name : {"a", "b", "c"}) {
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      expect_close(toy.of(toy.optimizer->state(toy.store->unit(0), state), name),
                   tensor(file, fmt::format("{}.{}.{}", prefix, state, name)), tolerance, state);
    }
  }
}

TEST(AdamW, ToyFixtureInFp64) {
  run_toy_fixture(at::kDouble, "f64", 2e-15);
}
TEST(AdamW, ToyFixtureInFp32) {
  run_toy_fixture(at::kFloat, "f32", 2e-6);
}

// A store of odd sizes with random masters and gradients.
struct Wide {
  explicit Wide(StoreDtypes dtypes, OptimizerOptions options = {}, bool split = false, int64_t rows = 301) {
    table.add("m", {rows, 333}, Split::kRows, {}, 0);
    table.add("norm", {77}, Split::kWhole, {Init::kOnes}, split ? 1 : 0);
    table.add("last", {55, 3 * rows}, Split::kRows, {}, split ? 1 : 0);
    StoreOptions store_options;
    store_options.dtypes = dtypes;
    store = std::make_unique<ParamStore>(table, split ? 2 : 1, store_options);
    store->init(3);
    optimizer = make_optimizer(*store, options);
  }
  void fill_grad(uint64_t step) {
    store->zero_grad();
    for (const auto& w : table.weights()) {
      const Random random(step, Purpose::kTest, hash_name(w->name().data(), w->name().size()));
      std::vector<double> values(w->numel());
      for (int64_t i = 0; i < w->numel(); ++i) values[i] = random.normal(i) * (1 + i % 7);
      w->unit()
          .grad_view(w->offset(), {w->numel()})
          .copy_(at::from_blob(values.data(), {w->numel()}, at::kDouble));
    }
  }
  at::Tensor param(const std::string& name) {
    const Weight& w = store->weight(name);
    return w.unit().shard().narrow(0, w.offset(), w.numel());
  }
  at::Tensor state(const std::string& weight, const std::string& name) {
    const Weight& w = store->weight(weight);
    return optimizer->state(w.unit(), name).narrow(0, w.offset(), w.numel());
  }
  WeightTable table;
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<Optimizer> optimizer;
};

// One update of torch's formula, in the arithmetic of `wide`.
void reference_adamw(at::Tensor& p, at::Tensor& m, at::Tensor& v, const at::Tensor& g, int t, double lr,
                     double wd) {
  m = m * 0.9 + g * (1 - 0.9);
  v = v * 0.95 + g * g * (1 - 0.95);
  p = p * (1 - lr * wd) - lr * (m / (1 - std::pow(0.9, t))) / ((v / (1 - std::pow(0.95, t))).sqrt() + 1e-8);
}

TEST(AdamW, EveryCombinationOfDtypesFollowsTheFormula) {
  struct Case {
    at::ScalarType param, reduce, state;
    double tolerance;  // of the masters after 3 updates, of a size of about 1
  };
  const double bf16 = 1.0 / 128;  // one unit in the last place at 1: three roundings to nearest of half of it
  for (const Case& c :
       {Case{at::kFloat, at::kFloat, at::kFloat, 1e-6}, Case{at::kFloat, at::kDouble, at::kFloat, 1e-6},
        Case{at::kFloat, at::kFloat, at::kBFloat16, 2e-3}, Case{at::kFloat, at::kDouble, at::kBFloat16, 2e-3},
        Case{at::kBFloat16, at::kFloat, at::kFloat, 1.5 * bf16},
        Case{at::kBFloat16, at::kDouble, at::kFloat, 1.5 * bf16},
        Case{at::kBFloat16, at::kFloat, at::kBFloat16, 1.5 * bf16},
        Case{at::kBFloat16, at::kDouble, at::kBFloat16, 1.5 * bf16},
        Case{at::kDouble, at::kFloat, at::kFloat, 1e-14},
        Case{at::kDouble, at::kDouble, at::kFloat, 1e-14}}) {
    SCOPED_TRACE(
        fmt::format("{} {} {}", c10::toString(c.param), c10::toString(c.reduce), c10::toString(c.state)));
    Wide wide({c.param, c.param, c.reduce}, {.state_dtype = c.state}, false, 9);
    std::map<std::string, std::array<at::Tensor, 3>> want;
    for (const auto& w : wide.table.weights()) {
      const at::Tensor p = wide.param(w->name()).to(at::kDouble).clone();
      want[w->name()] = {p, at::zeros_like(p), at::zeros_like(p)};
    }
    for (int t = 1; t <= 3; ++t) {
      wide.fill_grad(t);
      for (auto& [name, pmv] : want) {
        const Weight& w = wide.store->weight(name);
        const at::Tensor g = w.unit().grad_view(w.offset(), {w.numel()}).to(at::kDouble) * 0.5;
        reference_adamw(pmv[0], pmv[1], pmv[2], g, t, 0.01, 0.1);
      }
      wide.optimizer->step({.lr = 0.01, .clip = 0.5});
    }
    for (auto& [name, pmv] : want) {
      expect_close(wide.param(name), pmv[0], c.tolerance, name);
      EXPECT_EQ(wide.state(name, "exp_avg").scalar_type(), c.param == at::kDouble ? at::kDouble : c.state);
    }
  }
}

TEST(AdamW, RoundsBf16ToNearestEvenOnce) {
  // lr 1, eps and decay negligible: the first update moves every master by -sign(g), whatever the gradient's
  // size.
  Toy toy({at::kBFloat16, at::kBFloat16, at::kFloat}, {.eps = 1e-30, .weight_decay = 0});
  toy.store->zero_grad();
  toy.grad("b").fill_(1);
  const float ulp = 1.0f / 128;  // of bf16 in [1, 2)
  toy.param("b").copy_(at::tensor({1.0f, 1 + ulp, 1 + 2 * ulp, 1.0f, 1.0f}));
  toy.optimizer->step(
      {.lr = ulp / 2});  // each result lies half way between two bf16 numbers or, below 1, on one
  const at::Tensor b = toy.param("b").to(at::kFloat);
  EXPECT_EQ(b[0].item<float>(), 1 - ulp / 2);
  EXPECT_EQ(b[1].item<float>(), 1.0f);         // tie: to the even of 1 and 1 + ulp
  EXPECT_EQ(b[2].item<float>(), 1 + 2 * ulp);  // tie: to the even of 1 + ulp and 1 + 2 ulp
}

TEST(AdamW, DoesNotDependOnThreadsOrUnits) {
  const int before = at::get_num_threads();
  std::vector<at::Tensor> results;
  for (int threads : {1, 2, 5}) {
    for (bool split : {false, true}) {
      at::set_num_threads(threads);
      Wide wide({}, {.decay_norms_and_biases = false}, split);
      for (int t = 0; t < 3; ++t) {
        wide.fill_grad(t);
        wide.optimizer->step({.lr = 0.01, .clip = 0.7});
      }
      results.push_back(at::cat({wide.param("m"), wide.param("norm"), wide.param("last"),
                                 wide.state("m", "exp_avg"), wide.state("last", "exp_avg_sq")}));
    }
  }
  at::set_num_threads(before);
  for (const at::Tensor& r : results) EXPECT_TRUE(at::equal(r, results[0]));
}

TEST(AdamW, DecaySparesNormsAndBiasesWhenAsked) {
  for (bool all : {true, false}) {
    Toy toy({}, {.weight_decay = 0.5, .decay_norms_and_biases = all});
    toy.store->zero_grad();
    for (const char* name : {"a", "b", "c"}) toy.param(name).fill_(1);
    toy.optimizer->step({.lr = 0.1});  // gradients of zero: decay alone
    expect_close(toy.param("a"), at::full({4, 6}, 0.95), 1e-7, "a");
    expect_close(toy.param("c"), at::full({3, 2, 2}, 0.95), 1e-7, "c");
    expect_close(toy.param("b"), at::full({5}, all ? 0.95 : 1.0), 1e-7, "b");
    // gaps stay zero
    EXPECT_EQ(toy.store->unit(0).shard().narrow(0, 24, 40).abs().sum().item<double>(), 0);
  }
}

TEST(AdamW, ZeroesGradientsInTheSamePassWhenAsked) {
  Wide kept({}), zeroed({});
  for (int t = 0; t < 2; ++t) {
    kept.fill_grad(t);
    zeroed.fill_grad(t);
    kept.optimizer->step({.lr = 0.01});
    zeroed.optimizer->step({.lr = 0.01, .zero_grad = true});
  }
  EXPECT_TRUE(at::equal(kept.param("m"), zeroed.param("m")));
  EXPECT_GT(grad_norm(*kept.store).value, 0);
  EXPECT_EQ(grad_norm(*zeroed.store).value, 0);
}

TEST(Optimizer, StateIsMadeWhenAUnitIsFirstUpdated) {
  WeightTable table;
  table.add("frozen", {10}, Split::kWhole, {}, 0);
  table.add("trained", {10}, Split::kWhole, {}, 1);
  StoreOptions options;
  options.frozen = [](const std::string& name) { return name == "frozen"; };
  ParamStore store(table, 2, options);
  AdamW optimizer(store, {.state_dtype = at::kBFloat16});
  EXPECT_EQ(optimizer.bytes(), 0u);
  EXPECT_EQ(optimizer.bytes_planned(), 64u * 2 * 2);
  optimizer.step({.lr = 0.1});  // no gradients yet: nothing to update
  EXPECT_EQ(optimizer.bytes(), 0u);
  store.zero_grad();
  optimizer.step({.lr = 0.1});
  EXPECT_EQ(optimizer.bytes(), optimizer.bytes_planned());
  EXPECT_FALSE(optimizer.state(store.unit(0), "exp_avg").defined());
  EXPECT_EQ(optimizer.state(store.unit(1), "exp_avg").scalar_type(), at::kBFloat16);
  EXPECT_EQ(optimizer.updates(), 2);
  optimizer.drop_state(store.unit(1));
  EXPECT_EQ(optimizer.bytes(), 0u);
}

TEST(Optimizer, AnnouncesItsWritesAndStalesTheCast) {
  Toy toy({at::kFloat, at::kBFloat16, at::kFloat});
  std::vector<std::string> told;
  toy.store->set_write_hook([&](Unit& unit) {
    told.push_back(unit.name());
    EXPECT_EQ(toy.param("b")[0].item<float>(), 0);  // nothing is written yet
  });
  Unit& unit = toy.store->unit(0);
  unit.unshard();
  toy.store->zero_grad();
  toy.grad("b").fill_(1);
  toy.optimizer->step({.lr = 0.5});
  EXPECT_EQ(told, (std::vector<std::string>{"block 0"}));
  unit.unshard();
  EXPECT_NEAR(toy.store->weight("b").value()[0].item<double>(), -0.5, 1e-3);
}

// The cast that the update leaves is the one that unshard would make, in every place of it.
TEST(Optimizer, LeavesTheCastOfTheNewMasters) {
  for (const char* name : {"AdamW", "SGD"}) {
    for (const double momentum : {0.0, 0.9}) {
      Wide wide({at::kFloat, at::kBFloat16, at::kFloat},
                {.name = name, .momentum = momentum, .decay_norms_and_biases = false}, /*split=*/true);
      const auto step = [&](uint64_t i) {
        wide.fill_grad(i);
        wide.optimizer->step({.lr = 0.01, .clip = 0.7});
      };
      step(1);
      EXPECT_FALSE(wide.store->unit(0).current().defined());  // no memory for it yet, so it is not made
      for (const auto& unit : wide.store->units()) unit->unshard();
      step(2);
      for (const auto& unit : wide.store->units()) {
        ASSERT_TRUE(unit->current().defined());
        EXPECT_TRUE(at::equal(unit->current(), unit->shard().to(at::kBFloat16)));
      }
      wide.store->unit(0).reshard(/*keep_memory=*/false);
      step(3);
      EXPECT_FALSE(wide.store->unit(0).current().defined());
      wide.store->unit(0).unshard();
      EXPECT_TRUE(at::equal(wide.store->unit(0).current(), wide.store->unit(0).shard().to(at::kBFloat16)));
    }
  }
}

TEST(SGD, FollowsTorchWithMomentumAndCoupledDecay) {
  for (at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (double momentum : {0.0, 0.9}) {
      Toy toy({dtype, dtype, dtype}, {.name = "SGD", .weight_decay = 0.1, .momentum = momentum});
      const double lr = 0.05, clip = 0.5;
      toy.param("a").copy_(at::arange(24).view({4, 6}));
      at::Tensor p = toy.param("a").to(at::kDouble).clone(), buffer = at::zeros_like(p);
      for (int t = 1; t <= 4; ++t) {
        toy.store->zero_grad();
        toy.grad("a").fill_(t);
        toy.optimizer->step({.lr = lr, .clip = clip});
        const at::Tensor g = at::full_like(p, t * clip) + 0.1 * p;
        buffer = momentum * buffer + g;
        p = p - lr * buffer;
      }
      expect_close(toy.param("a"), p, dtype == at::kFloat ? 1e-5 : 1e-13, "a");
      EXPECT_EQ(toy.optimizer->state_names().size(), momentum == 0 ? 0u : 1u);
    }
  }
}

TEST(Optimizer, OptionsHoldFromTheNextStep) {
  Toy toy({at::kDouble, at::kDouble, at::kDouble}),
      other({at::kDouble, at::kDouble, at::kDouble}, {.weight_decay = 0.5});
  const auto step = [](Toy& t) {
    t.param("a").fill_(2);
    t.store->zero_grad();
    t.grad("a").fill_(0.5);
    t.optimizer->step({.lr = 0.1});
  };
  step(toy);
  step(other);
  OptimizerOptions options = toy.optimizer->options();
  options.weight_decay = 0.5;
  toy.optimizer->set_options(options);
  step(toy);
  step(other);
  EXPECT_TRUE(toy.param("a").equal(other.param("a")));

  options.beta2 = 1;
  EXPECT_THROW(toy.optimizer->set_options(options), BadConfig);
  options.beta2 = 0.5;
  options.state_dtype = at::kBFloat16;
  EXPECT_THROW(toy.optimizer->set_options(options), BadConfig);
  EXPECT_EQ(toy.optimizer->options().beta2, 0.95);
}

TEST(Optimizer, RefusesWhatIsOutOfRange) {
  WeightTable table;
  table.add("w", {4}, Split::kWhole, {}, 0);
  ParamStore store(table, 1, {});
  EXPECT_THROW(make_optimizer(store, {.name = "Adam"}), BadConfig);
  EXPECT_THROW(make_optimizer(store, {.beta1 = 1}), BadConfig);
  EXPECT_THROW(make_optimizer(store, {.eps = 0}), BadConfig);
  EXPECT_THROW(make_optimizer(store, {.weight_decay = -1}), BadConfig);
  EXPECT_THROW(make_optimizer(store, {.momentum = 1}), BadConfig);
  EXPECT_THROW(make_optimizer(store, {.state_dtype = at::kHalf}), BadConfig);
  const auto optimizer = make_optimizer(store, {});
  EXPECT_THROW(optimizer->step({.lr = std::nan("")}), Bug);
}

}  // namespace
}  // namespace titanium
