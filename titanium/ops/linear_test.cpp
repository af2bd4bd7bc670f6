// linear, embedding, and the sums over tokens behind them.
#include "titanium/ops/linear.h"

#include <torch/csrc/autograd/autograd.h>

#include "titanium/ops/linear_logprob.h"
#include "titanium/ops/products.h"
#include "titanium/ops/test_handle.h"
#include "titanium/ops/test_tensors.h"

namespace titanium {
namespace {

using torch::autograd::grad;

TEST(Linear, GradientsOfEveryInput) {
  at::manual_seed(1);
  at::Tensor x = leaf({5, 7}), r = leaf({5, 3}), w = leaf({3, 7}), b = leaf({3});
  const at::Tensor g = at::randn({5, 3}, at::kDouble);
  const at::Tensor plain = r + at::linear(x, w, b);
  const auto want = grad({plain}, {x, r, w, b}, {g});
  TestHandle weight(w.detach()), bias(b.detach());
  const at::Tensor y = linear(x, weight, &bias, r);
  EXPECT_LT(distance(y, plain), 1e-12);
  const auto got = grad({y}, {x, r}, {g});
  EXPECT_LT(distance(got[0], want[0]), 1e-9);
  EXPECT_LT(distance(got[1], want[1]), 1e-9);
  EXPECT_LT(distance(weight.sink, want[2]), 1e-9);
  EXPECT_LT(distance(bias.sink, want[3]), 1e-9);
  const at::Tensor bare = linear(x, weight);  // adds to what the sink holds
  EXPECT_LT(distance(bare, at::mm(x, w.t())), 1e-12);
  grad({bare}, {x}, {g});
  EXPECT_LT(distance(weight.sink, 2 * want[2]), 1e-9);
}

// In bf16 every result is the fp64 result of the same operands, rounded once; the weight gradient is not
// rounded at all.
TEST(Linear, Bf16RoundsOnce) {
  at::manual_seed(2);
  for (const int64_t T : {1, 3, 70, 600})
    for (const auto& [I, O] : std::vector<std::pair<int64_t, int64_t>>{{64, 96}, {51, 33}, {576, 200}}) {
      at::Tensor x = leaf({T, I}, at::kBFloat16), r = leaf({T, O}, at::kBFloat16);
      const at::Tensor w = leaf({O, I}, at::kBFloat16).detach(), b = leaf({O}, at::kBFloat16).detach();
      const at::Tensor g = at::randn({T, O}).to(at::kBFloat16);
      TestHandle weight(w), bias(b);
      const at::Tensor y = linear(x, weight, &bias, r);
      const auto got = grad({y}, {x, r}, {g});
      const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble); };
      const double half_step = 1.0 / 256 + 1e-5;  // relative to the entry
      const auto rounded = [&](const at::Tensor& a, const at::Tensor& exact) {
        const at::Tensor slack = exact.abs() * half_step + 1e-4 * exact.abs().max() * 1e-1;
        return at::all((a.to(at::kDouble) - exact).abs() <= slack).item<bool>();
      };
      EXPECT_TRUE(rounded(y, at::mm(wide(x), wide(w).t()) + wide(b) + wide(r))) << T << " " << I << " " << O;
      EXPECT_TRUE(rounded(got[0], at::mm(wide(g), wide(w)))) << T << " " << I << " " << O;
      EXPECT_TRUE(at::equal(got[1], g));
      EXPECT_LT(relative(weight.sink, at::mm(wide(g).t(), wide(x))), 2e-6) << T << " " << I << " " << O;
      EXPECT_LT(relative(bias.sink, wide(g).sum(0)), 2e-6);
    }
}

TEST(Linear, ViewsAreRead) {
  at::manual_seed(3);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble}) {
    const at::Tensor base = leaf({40, 90}, dtype).detach();
    for (const at::Tensor& view : {base.narrow(1, 5, 32), base.t().narrow(1, 3, 32)}) {
      at::Tensor x = view.detach().requires_grad_(), dense = view.contiguous().requires_grad_();
      TestHandle a(leaf({8, 32}, dtype).detach()), b(a.tensor.clone());
      const at::Tensor y = linear(x, a), z = linear(dense, b);
      EXPECT_TRUE(at::equal(y, z));
      const at::Tensor dx = grad({y.sum()}, {x})[0],
                       dz = grad({z.sum()}, {dense})[0];  // a gradient of stride 0
      EXPECT_LT(distance(dx, dz), 1e-12);
      EXPECT_LT(distance(a.sink, b.sink), 1e-12);
    }
  }
}

TEST(Linear, FrozenHandlesGetNothing) {
  at::manual_seed(4);
  at::Tensor x = leaf({5, 7});
  TestHandle weight(leaf({3, 7}).detach(), false), bias(leaf({3}).detach(), false);
  const at::Tensor y = linear(x, weight, &bias);
  EXPECT_LT(distance(grad({y.sum()}, {x})[0], weight.tensor.sum(0).expand({5, 7})), 1e-12);
  EXPECT_EQ(weight.sink.abs().sum().item<double>() + bias.sink.abs().sum().item<double>(), 0);
  EXPECT_TRUE(weight.queue.empty());
}

TEST(Linear, NoGradKeepsNothing) {
  at::manual_seed(5);
  at::Tensor x = leaf({5, 7});
  TestHandle weight(leaf({3, 7}).detach());
  {
    const at::AutoGradMode off(false);
    EXPECT_FALSE(linear(x, weight).requires_grad());
    EXPECT_EQ(x.use_count(), 1);
  }
  const at::Tensor y = linear(x, weight);
  EXPECT_TRUE(y.requires_grad());
}

// The unit's buffer is freed after the forward and filled anew before the backward (design D2).
TEST(Linear, BackwardUsesTheWeightAsItIsThen) {
  at::manual_seed(6);
  at::Tensor x = leaf({5, 7});
  TestHandle weight(leaf({3, 7}).detach());
  const at::Tensor y = linear(x, weight);
  weight.tensor.reset();
  EXPECT_THROW(grad({y.sum()}, {x}, {}, true), Bug);
  weight.tensor = leaf({3, 7}).detach();
  EXPECT_LT(distance(grad({y.sum()}, {x})[0], weight.tensor.sum(0).expand({5, 7})), 1e-12);
}

TEST(Linear, DeferredGradientOwnsWhatItNeeds) {
  at::manual_seed(7);
  TestHandle now(leaf({3, 7}).detach()), later(now.tensor);
  later.deferred = true;
  {
    at::Tensor x = leaf({5, 7});
    grad({linear(x, now).square().sum()}, {x});
    grad({linear(x, later).square().sum()}, {x});
  }
  EXPECT_EQ(later.sink.abs().sum().item<double>(), 0);
  later.run_queue();
  EXPECT_TRUE(at::equal(now.sink, later.sink));
}

TEST(Linear, RefusesWhatDoesNotFit) {
  TestHandle weight(at::zeros({3, 7}));
  EXPECT_THROW(linear(at::zeros({5, 6}), weight), Bug);
  EXPECT_THROW(linear(at::zeros({5, 7}, at::kDouble), weight), Bug);
  EXPECT_THROW(linear(at::zeros({5, 7}), weight, nullptr, at::zeros({5, 4})), Bug);
  EXPECT_THROW(add_outer(at::zeros({3, 7}, at::kBFloat16), at::zeros({5, 3}), at::zeros({5, 7})), Bug);
}

TEST(Linear, SameBitsForAnyThreads) {
  at::manual_seed(8);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const int64_t T : {33, 1030}) {
      at::Tensor x = leaf({T, 160}, dtype);
      const at::Tensor w = leaf({288, 160}, dtype).detach(), b = leaf({288}, dtype).detach();
      expect_same_bits_for_threads([&] {
        TestHandle weight(w), bias(b);
        const at::Tensor y = linear(x, weight, &bias);
        const at::Tensor dx = grad({y}, {x}, {y.detach()})[0];
        return std::vector<at::Tensor>{y.detach(), dx, weight.sink, bias.sink};
      });
    }
}

// A token's result does not depend on its neighbours in the pack (design D5), nor on whether the weight was
// packed before.
TEST(Linear, Bf16RowsAreIndependent) {
  at::manual_seed(9);
  const at::AutoGradMode off(false);
  for (const int64_t width : {96, 51, 1100}) {
    const at::Tensor x = at::randn({300, width}).to(at::kBFloat16),
                     r = at::randn({300, 130}).to(at::kBFloat16);
    TestHandle weight(at::randn({130, width}).to(at::kBFloat16)), bias(at::randn({130}).to(at::kBFloat16));
    const at::Tensor all = linear(x, weight, &bias, r), logits_of_all = logits(x, weight);
    for (const bool packed : {false, true}) {
      if (packed) weight.pack = std::make_shared<const PackedWeight>(weight.tensor);
      for (const auto& [first, n] : std::vector<std::pair<int64_t, int64_t>>{{0, 300},
                                                                             {0, 17},
                                                                             {70, 100},
                                                                             {299 - 64, 65},
                                                                             {5, 1},
                                                                             {7, 2},
                                                                             {64, 3},
                                                                             {1, 4},
                                                                             {3, 5},
                                                                             {9, 16}}) {
        const at::Tensor rows = x.narrow(0, first, n);
        EXPECT_TRUE(at::equal(linear(rows, weight, &bias, r.narrow(0, first, n)), all.narrow(0, first, n)))
            << width << " " << first << " " << n << packed;
        EXPECT_TRUE(at::equal(logits(rows, weight), logits_of_all.narrow(0, first, n)))
            << width << " " << first << " " << n << packed;
      }
    }
  }
}

TEST(Embedding, ForwardAndGradient) {
  at::manual_seed(10);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kDouble}) {
    at::Tensor anchor = at::zeros({}).requires_grad_();
    const at::Tensor ids = at::tensor({4, 0, 4, 2, 4}, at::kLong);
    TestHandle weight(leaf({6, 70}, dtype).detach());
    const at::Tensor y = embedding(ids, weight, anchor);
    EXPECT_TRUE(at::equal(y, weight.tensor.index_select(0, ids)));
    const at::Tensor g = at::randn({5, 70}).to(dtype);
    torch::autograd::backward({y}, {g});
    const at::Tensor want =
        at::zeros({6, 70}, weight.sink.options()).index_add_(0, ids, g.to(weight.sink.scalar_type()));
    EXPECT_LT(distance(weight.sink, want), dtype == at::kDouble ? 1e-12 : 1e-6);
    const at::AutoGradMode off(false);
    EXPECT_FALSE(embedding(ids, weight, anchor).requires_grad());
  }
}

TEST(Embedding, RefusesIdsOutOfRange) {
  const TestHandle weight(at::zeros({6, 2}));
  EXPECT_THROW(embedding(at::tensor({0, 6}, at::kLong), weight, {}), BadData);
  EXPECT_THROW(embedding(at::tensor({-1}, at::kLong), weight, {}), BadData);
  EXPECT_EQ(embedding(at::empty({0}, at::kLong), weight, {}).size(0), 0);
}

TEST(Linear, NoTokens) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    at::Tensor x = leaf({0, 8}, dtype);
    TestHandle weight(leaf({4, 8}, dtype).detach());
    const at::Tensor y = linear(x, weight);
    EXPECT_EQ(y.sizes(), (std::vector<int64_t>{0, 4}));
    EXPECT_EQ(grad({y}, {x}, {at::zeros({0, 4}).to(dtype)})[0].size(0), 0);
    EXPECT_EQ(weight.sink.abs().sum().item<double>(), 0);
  }
}

}  // namespace
}  // namespace titanium
