// The fused head against the plain composition.
#include "titanium/ops/linear_logprob.h"

#include <gtest/gtest.h>

#include <cmath>

#include "titanium/ops/test_handle.h"

namespace titanium {
namespace {

void close(const at::Tensor& got, const at::Tensor& want, double tolerance = 1e-9) {
  ASSERT_EQ(got.sizes(), want.sizes());
  EXPECT_LT((got - want).abs().max().item<double>(), tolerance);
}

struct Case {
  at::Tensor x, w, labels, temperature;  // [T, D], [V, D], [T], [T]
};
Case random_case(int64_t T, int64_t D, int64_t V, at::ScalarType dtype) {
  const auto options = at::dtype(at::kDouble);
  const at::Tensor temperature = at::rand({T}, options) + 0.5;
  return {at::randn({T, D}, options).to(dtype), at::randn({V, D}, options).to(dtype),
          at::randint(-1, V, {T}, at::kLong),
          dtype == at::kDouble ? temperature : temperature.to(at::kFloat)};
}

// All three by ATen, in the dtype of x.
HeadStats plain(const at::Tensor& x, const at::Tensor& w, const at::Tensor& labels,
                const at::Tensor& temperature) {
  const at::Tensor logp = at::log_softmax(at::mm(x, w.t()) / temperature.unsqueeze(1), 1), p = logp.exp();
  const at::Tensor picked = logp.gather(1, labels.clamp_min(0).unsqueeze(1)).squeeze(1);
  return {picked * (labels >= 0).to(picked.scalar_type()), -(p * logp).sum(1), p.square().sum(1)};
}

TEST(LinearLogprob, GradientsOfEveryInput) {
  Case c = random_case(6, 7, 11, at::kDouble);
  c.x.requires_grad_();
  c.w.requires_grad_();
  const at::Tensor a = at::randn({3, 6}, at::kDouble);
  const HeadStats want = plain(c.x, c.w, c.labels, c.temperature);
  const auto total = [&](const HeadStats& s) {
    return (a[0] * s.logprob + a[1] * s.entropy + a[2] * s.sum_pi_squared).sum();
  };
  const auto gradients = torch::autograd::grad({total(want)}, {c.x, c.w});
  TestHandle weight(c.w.detach());
  const HeadStats got = linear_logprob(c.x, weight, c.labels, c.temperature, {}, {true, true});
  close(got.logprob, want.logprob);
  close(got.entropy, want.entropy);
  close(got.sum_pi_squared, want.sum_pi_squared);
  close(torch::autograd::grad({total(got)}, {c.x})[0], gradients[0]);
  close(weight.sink, gradients[1]);
}

TEST(LinearLogprob, WeightedNll) {
  Case c = random_case(6, 7, 11, at::kDouble);
  c.x.requires_grad_();
  c.w.requires_grad_();
  const at::Tensor a = at::randn({6}, at::kDouble);
  const at::Tensor want = -(a * plain(c.x, c.w, c.labels, c.temperature).logprob).sum();
  const auto gradients = torch::autograd::grad({want}, {c.x, c.w});
  TestHandle weight(c.w.detach());
  const WeightedNll got = weighted_nll(c.x, weight, c.labels, a, c.temperature);
  close(got.loss, want);
  close(torch::autograd::grad({got.loss}, {c.x})[0], gradients[0]);
  close(weight.sink, gradients[1]);
}

}  // namespace
}  // namespace titanium
