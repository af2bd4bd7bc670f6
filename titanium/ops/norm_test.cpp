// rms_norm, norm_linear, swiglu and swiglu_linear against compositions of ATen.
#include "titanium/ops/norm.h"

#include <torch/csrc/autograd/autograd.h>

#include "titanium/ops/swiglu.h"
#include "titanium/ops/test_handle.h"
#include "titanium/ops/test_tensors.h"

namespace titanium {
namespace {

using torch::autograd::grad;

at::Tensor plain_norm(const at::Tensor& x, const at::Tensor& w, double eps) {
  return x / (x.square().mean(-1, true) + eps).sqrt() * w;
}
at::Tensor plain_swiglu(const at::Tensor& x) {
  const int64_t F = x.size(1) / 2;
  return at::silu(x.narrow(1, 0, F)) * x.narrow(1, F, F);
}

// By fp64, and for bf16 and fp32 by the fp64 result of the same numbers.
double tolerance(at::ScalarType dtype) {
  return dtype == at::kDouble ? 1e-9 : dtype == at::kFloat ? 4e-6 : 1.0 / 128;
}
const std::vector<at::ScalarType> kDtypes = {at::kDouble, at::kFloat, at::kBFloat16};

at::Tensor wide(const at::Tensor& x) {
  return x.detach().to(at::kDouble).requires_grad_();
}

TEST(Norm, GradientsOfEveryInput) {
  at::manual_seed(1);
  for (const at::ScalarType dtype : kDtypes)
    for (const int64_t D : {7, 64, 100}) {
      at::Tensor x = leaf({2, 35, D}, dtype), x64 = wide(x);
      TestHandle weight(leaf({D}, dtype).detach());
      at::Tensor w64 = wide(weight.tensor);
      const at::Tensor g = leaf({2, 35, D}, dtype).detach();
      const at::Tensor plain = plain_norm(x64, w64, 1e-5);
      const auto want = grad({plain}, {x64, w64}, {g.to(at::kDouble)});
      const at::Tensor y = rms_norm(x, weight, 1e-5);
      EXPECT_EQ(y.scalar_type(), dtype);
      EXPECT_LT(relative(y, plain), tolerance(dtype));
      EXPECT_LT(relative(grad({y}, {x}, {g})[0], want[0]), tolerance(dtype));
      EXPECT_LT(relative(weight.sink, want[1]), dtype == at::kDouble ? 1e-9 : 4e-6);
    }
}

TEST(Norm, SmallRowsKeepTheirEps) {
  const TestHandle weight(at::ones({4}, at::kDouble));
  const at::Tensor x = at::full({1, 4}, 1e-4, at::kDouble);  // mean square 1e-8
  EXPECT_NEAR(rms_norm(x, weight, 1e-6)[0][0].item<double>(), 1e-4 / std::sqrt(1e-8 + 1e-6), 1e-15);
}

TEST(NormLinear, GradientsOfEveryInput) {
  at::manual_seed(2);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    at::Tensor x = leaf({70, 37}, dtype), x64 = wide(x);
    TestHandle norm(leaf({37}, dtype).detach()), weight(leaf({5, 37}, dtype).detach()),
        bias(leaf({5}, dtype).detach());
    at::Tensor n = wide(norm.tensor), w = wide(weight.tensor), b = wide(bias.tensor);
    const at::Tensor g = leaf({70, 5}, dtype).detach();
    const at::Tensor plain = at::linear(plain_norm(x64, n, 1e-5), w, b);
    const auto want = grad({plain}, {x64, n, w, b}, {g.to(at::kDouble)});
    const at::Tensor y = norm_linear(x, norm, 1e-5, weight, &bias);
    EXPECT_LT(relative(y, plain), tolerance(dtype));
    EXPECT_LT(relative(grad({y}, {x}, {g})[0], want[0]), tolerance(dtype));
    EXPECT_LT(relative(norm.sink, want[1]), tolerance(dtype));
    EXPECT_LT(relative(weight.sink, want[2]), tolerance(dtype));
    EXPECT_LT(relative(bias.sink, want[3]), tolerance(dtype));
  }
}

TEST(Swiglu, ForwardAndGradient) {
  at::manual_seed(3);
  for (const at::ScalarType dtype : kDtypes)
    for (const int64_t F : {5, 32, 50}) {
      at::Tensor x = (leaf({21, 2 * F}, at::kDouble).detach() * 6).to(dtype).requires_grad_(), x64 = wide(x);
      const at::Tensor g = leaf({21, F}, dtype).detach();
      const at::Tensor plain = plain_swiglu(x64), y = swiglu(x);
      EXPECT_LT(relative(y, plain), tolerance(dtype));
      EXPECT_LT(relative(grad({y}, {x}, {g})[0], grad({plain}, {x64}, {g.to(at::kDouble)})[0]),
                tolerance(dtype));
    }
}

TEST(Swiglu, FarGatesStayFinite) {
  for (const at::ScalarType dtype : kDtypes) {
    at::Tensor x =
        at::tensor({-1e4, -200.0, 200.0, 1e4, 1.0, 1.0, 1.0, 1.0}, at::kDouble).to(dtype).view({1, 8});
    x.requires_grad_();
    const at::Tensor y = swiglu(x), dx = grad({y.sum()}, {x})[0];
    EXPECT_LT(distance(y, at::tensor({0.0, 0.0, 200.0, 1e4}, at::kDouble).view({1, 4}).to(dtype)), 1e-20);
    EXPECT_LT(distance(dx.narrow(1, 0, 4), at::tensor({0.0, 0.0, 1.0, 1.0}, at::kDouble).view({1, 4})),
              1e-20);
  }
}

TEST(SwigluLinear, GradientsOfEveryInput) {
  at::manual_seed(4);
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
    at::Tensor x = leaf({40, 22}, dtype), r = leaf({40, 4}, dtype), x64 = wide(x), r64 = wide(r);
    TestHandle weight(leaf({4, 11}, dtype).detach()), bias(leaf({4}, dtype).detach());
    at::Tensor w = wide(weight.tensor), b = wide(bias.tensor);
    const at::Tensor g = leaf({40, 4}, dtype).detach();
    const at::Tensor plain = r64 + at::linear(plain_swiglu(x64), w, b);
    const auto want = grad({plain}, {x64, r64, w, b}, {g.to(at::kDouble)});
    const at::Tensor y = swiglu_linear(x, weight, &bias, r);
    EXPECT_LT(relative(y, plain), tolerance(dtype));
    const auto got = grad({y}, {x, r}, {g});
    EXPECT_LT(relative(got[0], want[0]), tolerance(dtype));
    EXPECT_TRUE(at::equal(got[1], g));
    EXPECT_LT(relative(weight.sink, want[2]), tolerance(dtype));
    EXPECT_LT(relative(bias.sink, want[3]), tolerance(dtype));
  }
}

// Frozen weights get nothing, deferred gradients are those formed at once, NoGrad makes no node.
TEST(NormAndSwiglu, HandlesAreRespected) {
  at::manual_seed(5);
  at::Tensor x = leaf({9, 16});
  const auto run = [&](TestHandle& norm, TestHandle& up, TestHandle& down) {
    const at::Tensor y = swiglu_linear(norm_linear(x, norm, 1e-5, up), down, nullptr, x);
    return grad({y.square().sum()}, {x})[0];
  };
  const at::Tensor n = leaf({16}).detach(), u = leaf({24, 16}).detach(), d = leaf({16, 12}).detach();
  TestHandle norm(n), up(u), down(d), norm2(n), up2(u), down2(d), norm3(n, false), up3(u, false),
      down3(d, false);
  const at::Tensor want = run(norm, up, down);
  norm2.deferred = up2.deferred = down2.deferred = true;
  EXPECT_TRUE(at::equal(run(norm2, up2, down2), want));
  for (TestHandle* h : {&norm2, &up2, &down2}) {
    EXPECT_EQ(h->sink.abs().sum().item<double>(), 0);
    h->tensor.reset();
    h->run_queue();
  }
  EXPECT_TRUE(at::equal(norm.sink, norm2.sink));
  EXPECT_TRUE(at::equal(up.sink, up2.sink));
  EXPECT_TRUE(at::equal(down.sink, down2.sink));
  EXPECT_TRUE(at::equal(run(norm3, up3, down3), want));
  for (TestHandle* h : {&norm3, &up3, &down3}) EXPECT_EQ(h->sink.abs().sum().item<double>(), 0);
  const at::AutoGradMode off(false);
  EXPECT_FALSE(swiglu_linear(norm_linear(x, norm, 1e-5, up), down, nullptr, x).requires_grad());
  EXPECT_FALSE(rms_norm(x, norm, 1e-5).requires_grad() || swiglu(x).requires_grad());
}

TEST(NormAndSwiglu, BackwardUsesTheWeightAsItIsThen) {
  at::manual_seed(6);
  at::Tensor x = leaf({4, 8});
  const at::Tensor w = leaf({8}).detach(), g = at::ones({4, 8}, at::kDouble);
  TestHandle a(w), b(2 * w);
  const at::Tensor y = rms_norm(x, a, 1e-5), z = rms_norm(x, b, 1e-5);
  a.tensor = b.tensor;
  EXPECT_LT(distance(grad({y}, {x}, {g})[0], grad({z}, {x}, {g})[0]), 1e-12);
}

TEST(NormAndSwiglu, SameBitsForAnyThreads) {
  at::manual_seed(7);
  for (const at::ScalarType dtype : kDtypes) {
    at::Tensor x = leaf({333, 96}, dtype);
    const at::Tensor n = leaf({96}, dtype).detach(), u = leaf({128, 96}, dtype).detach(),
                     d = leaf({96, 64}, dtype).detach();
    expect_same_bits_for_threads([&] {
      TestHandle norm(n), up(u), down(d);
      const at::Tensor y = swiglu_linear(norm_linear(x, norm, 1e-5, up), down, nullptr, x);
      return std::vector<at::Tensor>{y.detach(), grad({y}, {x}, {y.detach()})[0], norm.sink, up.sink,
                                     down.sink};
    });
  }
}

// A row's result does not depend on the rows around it.
TEST(NormAndSwiglu, RowsAreIndependent) {
  at::manual_seed(8);
  const at::AutoGradMode off(false);
  const at::Tensor x = at::randn({77, 50});
  const TestHandle norm(at::randn({50}));
  EXPECT_TRUE(at::equal(rms_norm(x, norm, 1e-5).narrow(0, 40, 1), rms_norm(x.narrow(0, 40, 1), norm, 1e-5)));
  EXPECT_TRUE(at::equal(swiglu(x).narrow(0, 40, 1), swiglu(x.narrow(0, 40, 1))));
}

TEST(NormAndSwiglu, NoTokens) {
  at::Tensor x = leaf({0, 8});
  TestHandle norm(at::ones({8}, at::kDouble));
  EXPECT_EQ(grad({rms_norm(x, norm, 1e-5)}, {x}, {at::zeros({0, 8}, at::kDouble)})[0].size(0), 0);
  EXPECT_EQ(norm.sink.abs().sum().item<double>(), 0);
  EXPECT_EQ(swiglu(x).sizes(), (std::vector<int64_t>{0, 4}));
}

TEST(NormAndSwiglu, RefuseWhatDoesNotFit) {
  const TestHandle norm(at::ones({8}));
  EXPECT_THROW(rms_norm(at::zeros({2, 7}), norm, 1e-5), Bug);
  EXPECT_THROW(rms_norm(at::zeros({2, 8}, at::kDouble), norm, 1e-5), Bug);
  EXPECT_THROW(swiglu(at::zeros({2, 7})), Bug);
}

}  // namespace
}  // namespace titanium
