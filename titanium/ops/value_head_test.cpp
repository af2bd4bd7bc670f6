#include "titanium/ops/value_head.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "titanium/ops/test_handle.h"

namespace titanium {
namespace {

// The same formula, by libtorch.
TEST(ValueHead, ValuesAndGradientsAreThoseOfALinearLayer) {
  for (const int64_t D : {1, 7, 64, 200}) {
    const int64_t T = 37;
    const at::Tensor x = at::randn({T, D}, at::kDouble), g = at::randn({T}, at::kDouble);
    TestHandle weight(at::randn({1, D}, at::kDouble)), bias(at::randn({1}, at::kDouble));
    const at::Tensor in = x.clone().requires_grad_();
    const at::Tensor out = value_head(in, weight, bias);
    const at::Tensor dx = torch::autograd::grad({out}, {in}, {g})[0];
    EXPECT_TRUE(at::allclose(out, x.matmul(weight.tensor[0]) + bias.tensor[0], 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(dx, g.unsqueeze(1) * weight.tensor, 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(weight.sink, g.unsqueeze(0).matmul(x), 1e-12, 1e-12));
    EXPECT_TRUE(at::allclose(bias.sink, g.sum().view({1}), 1e-12, 1e-12));
  }
}

TEST(ValueHead, Bf16IsSummedInFp32AndATokenStandsAlone) {
  const at::Tensor x = at::randn({50, 96}).to(at::kBFloat16);
  TestHandle weight(at::randn({1, 96}).to(at::kBFloat16)), bias(at::randn({1}).to(at::kBFloat16));
  const at::Tensor all = value_head(x, weight, bias);
  ASSERT_EQ(all.scalar_type(), at::kFloat);
  const at::Tensor exact =
      x.to(at::kDouble).matmul(weight.tensor[0].to(at::kDouble)) + bias.tensor.to(at::kDouble);
  EXPECT_LT((all.to(at::kDouble) - exact).abs().max().item<double>(), 1e-5);
  for (int64_t t = 0; t < 50; t += 7)
    EXPECT_TRUE(value_head(x.narrow(0, t, 1), weight, bias).equal(all.narrow(0, t, 1)));
}

TEST(ValueHead, FrozenWeightsGetNoGradient) {
  TestHandle weight(at::randn({1, 8}), false), bias(at::randn({1}), false);
  const at::Tensor in = at::randn({3, 8}).requires_grad_();
  torch::autograd::grad({value_head(in, weight, bias).sum()}, {in});
  EXPECT_EQ(weight.sink.abs().sum().item<double>(), 0);
  EXPECT_EQ(bias.sink.abs().sum().item<double>(), 0);
}

}  // namespace
}  // namespace titanium
