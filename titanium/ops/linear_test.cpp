// linear, embedding and the sums over tokens behind them.
#include "titanium/ops/linear.h"

#include <gtest/gtest.h>

#include "titanium/ops/test_handle.h"

namespace titanium {
namespace {

TEST(Linear, GradientsOfEveryInput) {
  const auto options = at::dtype(at::kDouble);
  at::Tensor x = at::randn({5, 7}, options).requires_grad_(), r = at::randn({5, 3}, options).requires_grad_();
  at::Tensor w = at::randn({3, 7}, options).requires_grad_(), b = at::randn({3}, options).requires_grad_();
  const at::Tensor g = at::randn({5, 3}, options);
  const at::Tensor plain = r + at::linear(x, w, b);
  const auto want = torch::autograd::grad({plain}, {x, r, w, b}, {g});
  TestHandle weight(w.detach()), bias(b.detach());
  const at::Tensor y = linear(x, weight, &bias, r);
  EXPECT_TRUE(at::allclose(y, plain, 1e-12, 1e-12));
  const auto got = torch::autograd::grad({y}, {x, r}, {g});
  EXPECT_TRUE(at::allclose(got[0], want[0], 1e-9, 1e-9));
  EXPECT_TRUE(at::allclose(got[1], want[1], 1e-9, 1e-9));
  EXPECT_TRUE(at::allclose(weight.sink, want[2], 1e-9, 1e-9));
  EXPECT_TRUE(at::allclose(bias.sink, want[3], 1e-9, 1e-9));
  const at::Tensor bare = linear(x, weight);
  EXPECT_TRUE(at::allclose(bare, at::mm(x, w.t()), 1e-12, 1e-12));
  torch::autograd::grad({bare}, {x}, {g});
  EXPECT_TRUE(at::allclose(weight.sink, 2 * want[2], 1e-9, 1e-9));
}

}  // namespace
}  // namespace titanium
