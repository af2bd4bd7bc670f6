// The fused head against the plain composition of ATen.
#include "titanium/ops/linear_logprob.h"

#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "titanium/ops/test_handle.h"
#include "titanium/ops/test_tensors.h"

namespace titanium {
namespace {

using torch::autograd::grad;

struct Case {
  at::Tensor x, w, labels, temperature;  // [T, D], [V, D], [T], [T]

  // Logits of standard deviation about `spread`.
  Case(int64_t T, int64_t D, int64_t V, at::ScalarType dtype, double spread = 2)
      : x(leaf({T, D}, dtype)),
        w((at::randn({V, D}, at::kDouble) * (spread / std::sqrt(static_cast<double>(D)))).to(dtype)),
        labels(at::randint(-1, V, {T}, at::kLong)),
        temperature((at::rand({T}, at::kDouble) + 0.5).to(dtype == at::kDouble ? at::kDouble : at::kFloat)) {}
};

// All three outputs by ATen, in the dtype of x.
HeadStats plain(const at::Tensor& x, const at::Tensor& w, const at::Tensor& labels,
                const at::Tensor& temperature) {
  const at::Tensor logp = at::log_softmax(at::mm(x, w.t()) / temperature.unsqueeze(1), 1), p = logp.exp();
  const at::Tensor picked = logp.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1);
  return {picked * (labels >= 0).to(picked.scalar_type()), -(p * logp).sum(1), p.square().sum(1)};
}

// A sum of all three, each row with its own factors [3, T].
at::Tensor total(const HeadStats& s, const at::Tensor& factors) {
  return (factors[0] * s.logprob + factors[1] * s.entropy + factors[2] * s.sum_pi_squared).sum();
}

TEST(LinearLogprob, GradientsOfEveryInput) {
  at::manual_seed(1);
  for (const int64_t V : {11, 1000, 2100}) {
    Case c(70, 7, V, at::kDouble);
    c.w.requires_grad_();
    const at::Tensor factors = at::randn({3, 70}, at::kDouble);
    const HeadStats want = plain(c.x, c.w, c.labels, c.temperature);
    const auto gradients = grad({total(want, factors)}, {c.x, c.w});
    TestHandle weight(c.w.detach());
    const HeadStats got = linear_logprob(c.x, weight, c.labels, c.temperature, {}, {true, true});
    EXPECT_LT(distance(got.logprob, want.logprob), 1e-9);
    EXPECT_LT(distance(got.entropy, want.entropy), 1e-9);
    EXPECT_LT(distance(got.sum_pi_squared, want.sum_pi_squared), 1e-9);
    EXPECT_LT(distance(grad({total(got, factors)}, {c.x})[0], gradients[0]), 1e-9);
    EXPECT_LT(distance(weight.sink, gradients[1]), 1e-9);
  }
}

TEST(LinearLogprob, EachOutputAlone) {
  at::manual_seed(2);
  Case c(9, 7, 40, at::kDouble);
  c.w.requires_grad_();
  const HeadStats want = plain(c.x, c.w, c.labels, c.temperature);
  for (int output = 0; output < 3; ++output) {
    const auto one = [&](const HeadStats& s) {
      return (output == 0 ? s.logprob : output == 1 ? s.entropy : s.sum_pi_squared).square().sum();
    };
    TestHandle weight(c.w.detach());
    const HeadStats got =
        linear_logprob(c.x, weight, c.labels, c.temperature, {}, {output == 1, output == 2});
    EXPECT_EQ(got.entropy.defined(), output == 1);
    EXPECT_EQ(got.sum_pi_squared.defined(), output == 2);
    const auto gradients = grad({one(want)}, {c.x, c.w}, {}, true);
    EXPECT_LT(distance(grad({one(got)}, {c.x})[0], gradients[0]), 1e-9);
    EXPECT_LT(distance(weight.sink, gradients[1]), 1e-9);
  }
}

// A fused kernel that was wrong for some shapes gave log-probs of up to +123: vocabularies beside the tile,
// widths that are no multiple of 32, x that does not lie by rows.
TEST(LinearLogprob, OddShapes) {
  at::manual_seed(3);
  struct Shape {
    int64_t T, D, V;
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
    for (const Shape& s :
         {Shape{67, 50, 1000}, {5, 33, 1025}, {16, 24, 151936}, {66, 64, 1}, {1, 32, 2049}}) {
      Case c(s.T, s.D, s.V, dtype);
      c.x = leaf({s.D + 1, s.T}, dtype).detach().t().narrow(1, 1, s.D).requires_grad_();
      ASSERT_FALSE(c.x.is_contiguous() && s.T > 1);
      at::Tensor x = c.x.detach().to(at::kDouble).requires_grad_(), w = c.w.to(at::kDouble).requires_grad_();
      const at::Tensor factors = at::randn({3, s.T});
      const HeadStats want = plain(x, w, c.labels, c.temperature.to(at::kDouble));
      TestHandle weight(c.w);
      const HeadStats got = linear_logprob(c.x, weight, c.labels, c.temperature, {}, {true, true});
      EXPECT_LE(got.logprob.max().item<double>(), 0);
      EXPECT_LT(distance(got.logprob, want.logprob), 1e-4);
      EXPECT_LT(distance(got.entropy, want.entropy), 1e-4);
      EXPECT_LT(distance(got.sum_pi_squared, want.sum_pi_squared), 1e-4);
      const auto gradients = grad({total(want, factors.to(at::kDouble))}, {x, w});
      // In bf16 the gradient by the logits is rounded once, and dx once.
      const double bound = dtype == at::kFloat ? 1e-4 : 1e-2;
      const double scale = std::max(1.0, gradients[0].abs().max().item<double>());
      EXPECT_LT(distance(grad({total(got, factors)}, {c.x})[0], gradients[0]), bound * scale) << s.V;
      EXPECT_LT(distance(weight.sink, gradients[1]),
                bound * std::max(1.0, gradients[1].abs().max().item<double>()));
    }
}

// Log-probs at another temperature than the sampler's once made a ratio of 2 before the first update.
TEST(LinearLogprob, TemperatureByHand) {
  const at::AutoGradMode off(false);
  const at::Tensor x = at::ones({2, 1}, at::kDouble), labels = at::zeros({2}, at::kLong);
  const TestHandle weight(at::tensor({2.0, 0.0}, at::kDouble).view({2, 1}));
  const HeadStats got =
      linear_logprob(x, weight, labels, at::tensor({0.5, 1.0}, at::kDouble), {}, {true, true});
  EXPECT_NEAR(got.logprob[0].item<double>(), -0.018150, 1e-6);
  EXPECT_NEAR(got.logprob[1].item<double>(), -0.126928, 1e-6);
  for (int i = 0; i < 2; ++i) {  // the entropy is at the temperature too
    const double p = 1 / (1 + std::exp(i == 0 ? -4.0 : -2.0));
    EXPECT_NEAR(got.entropy[i].item<double>(), -p * std::log(p) - (1 - p) * std::log(1 - p), 1e-6);
    EXPECT_NEAR(got.sum_pi_squared[i].item<double>(), p * p + (1 - p) * (1 - p), 1e-6);
  }
  EXPECT_TRUE(at::equal(linear_logprob(x, weight, labels).logprob, got.logprob[1].expand({2})));
}

// Only the chosen rows are computed, and they are as in the full computation.
TEST(LinearLogprob, ChosenRows) {
  at::manual_seed(4);
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    Case c(150, 32, 1200, dtype);
    const at::Tensor rows = at::tensor({0, 3, 70, 71, 149}, at::kLong);
    const at::Tensor mask = at::zeros({150}, c.temperature.options()).index_fill_(0, rows, 1);
    const at::Tensor factors = at::randn({3, 150}).to(mask.scalar_type()) * mask;
    TestHandle full(c.w), few(c.w);
    const HeadStats all = linear_logprob(c.x, full, c.labels, c.temperature, {}, {true, true});
    const HeadStats some = linear_logprob(c.x, few, c.labels, c.temperature, rows, {true, true});
    EXPECT_TRUE(at::equal(some.logprob, all.logprob * mask));
    EXPECT_TRUE(at::equal(some.entropy, all.entropy * mask));
    EXPECT_TRUE(at::equal(some.sum_pi_squared, all.sum_pi_squared * mask));
    EXPECT_LT(distance(grad({total(some, factors)}, {c.x})[0], grad({total(all, factors)}, {c.x})[0]), 1e-12);
    EXPECT_LT(distance(few.sink, full.sink), dtype == at::kDouble ? 1e-12 : 1e-6);
  }
}

// A row that is not chosen is not computed and thrown away after: its NaN would reach the weight's gradient.
TEST(LinearLogprob, RowsThatAreNotChosenAreNotRead) {
  at::manual_seed(14);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    Case c(150, 32, 1200, dtype);
    const at::Tensor rows = at::tensor({0, 3, 70, 71, 149}, at::kLong);
    at::Tensor poisoned = at::full({150, 32}, std::nan(""), c.x.options().requires_grad(false));
    poisoned.index_copy_(0, rows, c.x.detach().index_select(0, rows));
    poisoned.requires_grad_();
    const at::Tensor mask = at::zeros({150}, c.temperature.options()).index_fill_(0, rows, 1);
    const at::Tensor factors = at::randn({3, 150}).to(mask.scalar_type()) * mask;
    TestHandle clean(c.w), few(c.w);
    const HeadStats want = linear_logprob(c.x, clean, c.labels, c.temperature, rows, {true, true});
    const HeadStats got = linear_logprob(poisoned, few, c.labels, c.temperature, rows, {true, true});
    EXPECT_TRUE(at::equal(got.logprob, want.logprob));
    EXPECT_TRUE(at::equal(got.entropy, want.entropy));
    EXPECT_TRUE(at::equal(got.sum_pi_squared, want.sum_pi_squared));
    EXPECT_TRUE(
        at::equal(grad({total(got, factors)}, {poisoned})[0], grad({total(want, factors)}, {c.x})[0]));
    EXPECT_TRUE(at::equal(few.sink, clean.sink));
  }
}

// 2.7e-2 when logits are rounded to bf16 on the way.
TEST(LinearLogprob, Bf16LogSumExpIsInFp32) {
  at::manual_seed(5);
  const at::AutoGradMode off(false);
  const Case c(128, 576, 5000, at::kBFloat16, 8);
  const at::Tensor one = at::ones({128}, at::kDouble);
  const HeadStats want = plain(c.x.to(at::kDouble), c.w.to(at::kDouble), c.labels, one);
  const HeadStats got = linear_logprob(c.x, TestHandle(c.w), c.labels);
  EXPECT_LT(distance(got.logprob, want.logprob), 1e-4);
}

TEST(LinearLogprob, VanishingProbabilities) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    at::Tensor x = at::tensor({1.0, -1.0}, at::kDouble).to(dtype).view({2, 1}).requires_grad_();
    TestHandle weight(at::tensor({2000.0, 0.0, -2000.0}).to(dtype).view({3, 1}));
    const HeadStats got = linear_logprob(x, weight, at::zeros({2}, at::kLong), {}, {}, {true, true});
    EXPECT_LT(distance(got.logprob, at::tensor({0.0, -4000.0})), 1e-20);
    EXPECT_LT(distance(got.entropy, at::zeros({2})), 1e-20);
    EXPECT_LT(distance(got.sum_pi_squared, at::ones({2})), 1e-20);
    const at::Tensor sum = got.logprob.sum() + got.entropy.sum() + got.sum_pi_squared.sum();
    // Row 0 is at its maximum; row 1 pulls its label from 0 to 1.
    EXPECT_LT(distance(grad({sum}, {x})[0], at::tensor({0.0, 4000.0}, at::kDouble).view({2, 1})), 1e-20);
    EXPECT_LT(distance(weight.sink, at::tensor({-1.0, 0.0, 1.0}, at::kDouble).view({3, 1})), 1e-20);
  }
}

TEST(LinearLogprob, NotANumberIsNotHidden) {
  const at::AutoGradMode off(false);
  at::Tensor x = at::ones({2, 4});
  x[1][2] = NAN;
  const HeadStats got =
      linear_logprob(x, TestHandle(at::ones({5, 4})), at::zeros({2}, at::kLong), {}, {}, {true, true});
  EXPECT_NEAR(got.logprob[0].item<double>(), -std::log(5.0), 1e-6);
  EXPECT_TRUE(std::isnan(got.logprob[1].item<double>()) && std::isnan(got.entropy[1].item<double>()));
}

TEST(LinearLogprob, HandlesAreRespected) {
  at::manual_seed(6);
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    Case c(70, 32, 1100, dtype);
    const auto run = [&](TestHandle& weight, bool replaced) {
      const HeadStats s = linear_logprob(c.x, weight, c.labels, c.temperature, {}, {true, false});
      if (replaced) weight.tensor = weight.tensor.clone();  // the old buffer may be gone
      return grad({(s.logprob * 0.5 + s.entropy).sum()}, {c.x})[0];
    };
    TestHandle now(c.w), frozen(c.w, false), later(c.w), again(c.w.clone());
    const at::Tensor want = run(now, false);
    EXPECT_TRUE(at::equal(run(again, true), want));
    EXPECT_TRUE(at::equal(again.sink, now.sink));
    EXPECT_TRUE(at::equal(run(frozen, false), want));
    EXPECT_EQ(frozen.sink.abs().sum().item<double>(), 0);
    later.deferred = true;
    EXPECT_TRUE(at::equal(run(later, false), want));
    EXPECT_EQ(later.sink.abs().sum().item<double>(), 0);
    later.tensor.reset();
    later.run_queue();
    EXPECT_TRUE(at::equal(later.sink, now.sink));
    const at::AutoGradMode off(false);
    EXPECT_FALSE(linear_logprob(c.x, now, c.labels).logprob.requires_grad());
    EXPECT_FALSE(weighted_nll(c.x, now, c.labels, c.temperature).loss.requires_grad());
    EXPECT_TRUE(at::equal(later.sink, now.sink));
  }
}

TEST(LinearLogprob, BackwardUsesTheWeightAsItIsThen) {
  at::manual_seed(7);
  Case c(6, 8, 20, at::kDouble);
  TestHandle weight(c.w);
  const HeadStats s = linear_logprob(c.x, weight, c.labels);
  weight.tensor.reset();
  EXPECT_THROW(grad({s.logprob.sum()}, {c.x}, {}, true), Bug);
  weight.tensor = c.w.clone();
  at::Tensor x = c.x.detach().requires_grad_();
  const at::Tensor want = grad({plain(x, c.w, c.labels, at::ones({6}, at::kDouble)).logprob.sum()}, {x})[0];
  EXPECT_LT(distance(grad({s.logprob.sum()}, {c.x})[0], want), 1e-9);
}

TEST(LinearLogprob, SameBitsForAnyThreadsAndNeighbours) {
  at::manual_seed(8);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    Case c(200, 64, 2500, dtype);
    expect_same_bits_for_threads([&] {
      TestHandle weight(c.w);
      const HeadStats s = linear_logprob(c.x, weight, c.labels, c.temperature, {}, {true, true});
      const at::Tensor dx = grad({(s.logprob + s.entropy + s.sum_pi_squared).sum()}, {c.x})[0];
      return std::vector<at::Tensor>{s.logprob.detach(), s.entropy.detach(), dx, weight.sink};
    });
    const at::AutoGradMode off(false);
    const TestHandle weight(c.w);
    const at::Tensor all = linear_logprob(c.x, weight, c.labels, c.temperature).logprob;
    for (const auto& [first, n] : std::vector<std::pair<int64_t, int64_t>>{{0, 1}, {60, 90}})
      EXPECT_TRUE(at::equal(linear_logprob(c.x.narrow(0, first, n), weight, c.labels.narrow(0, first, n),
                                           c.temperature.narrow(0, first, n))
                                .logprob,
                            all.narrow(0, first, n)));
  }
}

TEST(LinearLogprob, NoRows) {
  Case c(0, 8, 20, at::kFloat);
  TestHandle weight(c.w);
  EXPECT_EQ(linear_logprob(c.x, weight, c.labels).logprob.size(0), 0);
  at::Tensor x = leaf({3, 8}, at::kFloat);
  const at::Tensor labels = at::zeros({3}, at::kLong), none = at::empty({0}, at::kLong);
  const HeadStats s = linear_logprob(x, weight, labels, {}, none);
  EXPECT_EQ(distance(s.logprob, at::zeros({3})), 0);
  EXPECT_EQ(distance(grad({s.logprob.sum()}, {x})[0], at::zeros({3, 8})), 0);
  const WeightedNll nll = weighted_nll(x, weight, labels, at::ones({3}), {}, none);
  EXPECT_EQ(nll.loss.item<double>(), 0);
  EXPECT_EQ(distance(grad({nll.loss}, {x})[0], at::zeros({3, 8})), 0);
  EXPECT_EQ(weight.sink.abs().sum().item<double>(), 0);
}

TEST(LinearLogprob, RefusesWhatDoesNotFit) {
  const TestHandle weight(at::zeros({5, 4}));
  const at::Tensor x = at::zeros({2, 4}), labels = at::zeros({2}, at::kLong);
  EXPECT_THROW(linear_logprob(x, weight, at::tensor({0, 5}, at::kLong)), BadData);
  EXPECT_THROW(linear_logprob(x, weight, labels, at::tensor({1.0, 0.0}, at::kFloat)), BadData);
  EXPECT_THROW(linear_logprob(at::zeros({2, 3}), weight, labels), Bug);
  EXPECT_THROW(linear_logprob(x, weight, at::zeros({3}, at::kLong)), Bug);
  EXPECT_THROW(weighted_nll(x, weight, labels, at::ones({3})), Bug);
}

TEST(WeightedNll, LossAndGradients) {
  at::manual_seed(9);
  for (const bool chosen : {false, true}) {
    Case c(80, 7, 1100, at::kDouble);
    c.w.requires_grad_();
    const at::Tensor weights = at::randn({80}, at::kDouble);
    at::Tensor rows, mask = at::ones({80}, at::kDouble);
    if (chosen) {
      rows = at::tensor({1, 2, 66}, at::kLong);
      mask = at::zeros({80}, at::kDouble).index_fill_(0, rows, 1);
    }
    const at::Tensor logprob = plain(c.x, c.w, c.labels, c.temperature).logprob * mask;
    const at::Tensor want = -(weights * logprob).sum();
    const auto gradients = grad({want}, {c.x, c.w});
    TestHandle weight(c.w.detach());
    const WeightedNll got = weighted_nll(c.x, weight, c.labels, weights, c.temperature, rows);
    EXPECT_LT(distance(got.loss, want), 1e-9);
    EXPECT_LT(distance(got.logprob, logprob), 1e-9);
    EXPECT_FALSE(got.logprob.requires_grad());
    EXPECT_LT(distance(grad({got.loss + 3.0}, {c.x})[0], gradients[0]), 1e-9);
    EXPECT_LT(distance(weight.sink, gradients[1]), 1e-9);
  }
}

// More rows than logits are held of, so that several chunks add to the same sink.
TEST(WeightedNll, ChunksOfRows) {
  at::manual_seed(11);
  Case c(600, 8, 45000, at::kFloat);
  TestHandle once(c.w), later(c.w), twice(c.w);
  later.deferred = true;
  const at::Tensor weights = at::rand({600});
  const WeightedNll a = weighted_nll(c.x, once, c.labels, weights, c.temperature);
  const WeightedNll b = weighted_nll(c.x, later, c.labels, weights, c.temperature);
  const at::Tensor logprob = linear_logprob(c.x, twice, c.labels, c.temperature).logprob;
  const at::Tensor loss = -(weights * logprob).sum(), want = grad({loss}, {c.x})[0];
  EXPECT_TRUE(at::equal(a.logprob, logprob));
  EXPECT_LT(relative(a.loss, loss), 1e-6);
  const at::Tensor dx = grad({a.loss}, {c.x})[0];
  EXPECT_LT(relative(dx, want), 1e-6);
  EXPECT_LT(relative(once.sink, twice.sink), 1e-6);
  EXPECT_TRUE(at::equal(grad({b.loss}, {c.x})[0], dx));
  later.run_queue();
  EXPECT_TRUE(at::equal(later.sink, once.sink));
}

// The weight gradient is in the sink already, so a scale that comes later would be lost.
TEST(WeightedNll, RefusesAScaleFromOutside) {
  Case c(4, 8, 20, at::kFloat);
  TestHandle weight(c.w);
  const WeightedNll got = weighted_nll(c.x, weight, c.labels, at::ones({4}));
  EXPECT_THROW(grad({got.loss * 2}, {c.x}), Bug);
}

TEST(Logits, AllRows) {
  at::manual_seed(10);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16})
    for (const int64_t T : {0, 1, 4, 5, 70}) {
      const Case c(T, 40, 2100, dtype);
      const at::Tensor got = logits(c.x, TestHandle(c.w));
      EXPECT_EQ(got.scalar_type(), dtype == at::kDouble ? at::kDouble : at::kFloat);
      EXPECT_LT(distance(got, at::mm(c.x.detach().to(at::kDouble), c.w.to(at::kDouble).t())), 1e-4);
      EXPECT_FALSE(got.requires_grad());
    }
}

}  // namespace
}  // namespace titanium
