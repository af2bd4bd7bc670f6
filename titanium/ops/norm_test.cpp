// rms_norm, norm_linear, swiglu, swiglu_linear against compositions of ATen in fp64.
#include "titanium/ops/norm.h"

#include <gtest/gtest.h>

#include "titanium/ops/swiglu.h"
#include "titanium/ops/test_handle.h"

namespace titanium {
namespace {

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& w, double eps) {
  return x / (x.square().mean(-1, true) + eps).sqrt() * w;
}
void close(const at::Tensor& got, const at::Tensor& want, double tolerance = 1e-9) {
  ASSERT_EQ(got.sizes(), want.sizes());
  EXPECT_LT((got - want).abs().max().item<double>(), tolerance);
}

TEST(Norm, GradientsOfEveryInput) {
  const auto options = at::dtype(at::kDouble);
  at::Tensor x = at::randn({2, 3, 7}, options).requires_grad_(), w = at::randn({7}, options).requires_grad_();
  const at::Tensor g = at::randn({2, 3, 7}, options);
  const at::Tensor plain = plain_norm(x, w, 1e-5);
  const auto want = torch::autograd::grad({plain}, {x, w}, {g});
  TestHandle weight(w.detach());
  const at::Tensor y = rms_norm(x, weight, 1e-5);
  close(y, plain);
  close(torch::autograd::grad({y}, {x}, {g})[0], want[0]);
  close(weight.sink, want[1]);
}

TEST(NormLinear, GradientsOfEveryInput) {
  const auto options = at::dtype(at::kDouble);
  at::Tensor x = at::randn({6, 7}, options).requires_grad_(), n = at::randn({7}, options).requires_grad_();
  at::Tensor w = at::randn({4, 7}, options).requires_grad_(), b = at::randn({4}, options).requires_grad_();
  const at::Tensor g = at::randn({6, 4}, options);
  const at::Tensor plain = at::linear(plain_norm(x, n, 1e-5), w, b);
  const auto want = torch::autograd::grad({plain}, {x, n, w, b}, {g});
  TestHandle norm(n.detach()), weight(w.detach()), bias(b.detach());
  const at::Tensor y = norm_linear(x, norm, 1e-5, weight, &bias);
  close(y, plain);
  close(torch::autograd::grad({y}, {x}, {g})[0], want[0]);
  close(norm.sink, want[1]);
  close(weight.sink, want[2]);
  close(bias.sink, want[3]);
}

TEST(SwigluLinear, GradientsOfEveryInput) {
  const auto options = at::dtype(at::kDouble);
  at::Tensor x = at::randn({6, 10}, options).requires_grad_(),
             r = at::randn({6, 4}, options).requires_grad_();
  at::Tensor w = at::randn({4, 5}, options).requires_grad_(), b = at::randn({4}, options).requires_grad_();
  const at::Tensor g = at::randn({6, 4}, options);
  const at::Tensor hidden = at::silu(x.narrow(1, 0, 5)) * x.narrow(1, 5, 5);
  close(swiglu(x), hidden);
  const at::Tensor plain = r + at::linear(hidden, w, b);
  const auto want = torch::autograd::grad({plain}, {x, r, w, b}, {g});
  TestHandle weight(w.detach()), bias(b.detach());
  const at::Tensor y = swiglu_linear(x, weight, &bias, r);
  close(y, plain);
  const auto got = torch::autograd::grad({y}, {x, r}, {g});
  close(got[0], want[0]);
  close(got[1], want[1]);
  close(weight.sink, want[2]);
  close(bias.sink, want[3]);
}

}  // namespace
}  // namespace titanium
