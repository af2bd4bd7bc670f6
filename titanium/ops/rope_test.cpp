#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "titanium/base/random.h"
#include "titanium/ops/attention.h"
#include "titanium/ops/test_handle.h"

namespace titanium {
namespace {

at::Tensor normal(at::IntArrayRef sizes, uint64_t stream) {
  at::Tensor x = at::empty(sizes, at::kDouble);
  const Random random(11, Purpose::kTest, stream);
  double* p = x.mutable_data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) p[i] = random.normal(i);
  return x;
}

struct Case {
  int64_t T, N, K, H;
  bool q_norm, k_norm;
};

const std::vector<Case> kCases = {{70, 9, 3, 64, false, false}, {5, 2, 2, 10, false, false},
                                  {1, 1, 1, 2, true, true},     {150, 4, 2, 128, true, true},
                                  {67, 3, 1, 34, true, true},   {66, 2, 1, 32, true, false},
                                  {3, 2, 1, 256, false, true},  {0, 2, 1, 32, true, true}};

struct Problem {
  at::Tensor qkv, q_weight, k_weight, grads[3];
  RopeAngles angles;

  Problem(const Case& c, at::ScalarType dtype) {
    qkv = normal({c.T, (c.N + 2 * c.K) * c.H}, 1).to(dtype);
    q_weight = normal({c.H}, 2).to(dtype);
    k_weight = normal({c.H}, 3).to(dtype);
    grads[0] = normal({c.T, c.N, c.H}, 4).to(dtype);
    grads[1] = normal({c.T, c.K, c.H}, 5).to(dtype);
    grads[2] = normal({c.T, c.K, c.H}, 6).to(dtype);
    std::vector<double> frequencies;
    for (int64_t i = 0; i < c.H / 2; ++i) frequencies.push_back(std::pow(10000.0, -2.0 * i / c.H));
    angles =
        rope_angles(at::arange(c.T) * 37, frequencies, 1.25, dtype == at::kDouble ? at::kDouble : at::kFloat);
  }
};

struct Result {
  at::Tensor q, k, v, d_qkv, d_q_weight, d_k_weight;
};

Result run(const Case& c, const Problem& p) {
  const TestHandle q_norm(p.q_weight), k_norm(p.k_weight);
  const at::Tensor qkv = p.qkv.detach().requires_grad_();
  const auto [q, k, v] = split_rope(qkv, c.N, c.K, c.H, p.angles, c.q_norm ? &q_norm : nullptr,
                                    c.k_norm ? &k_norm : nullptr, 1e-5);
  const auto grads = torch::autograd::grad({q, k, v}, {qkv}, {p.grads[0], p.grads[1], p.grads[2]});
  return {q.detach(), k.detach(), v.detach(), grads[0], q_norm.sink, k_norm.sink};
}

// The same from ATen's operations in fp64, differentiated by autograd.
Result reference(const Case& c, const Problem& p) {
  const at::Tensor qkv = p.qkv.to(at::kDouble).detach().requires_grad_();
  const at::Tensor q_weight = p.q_weight.to(at::kDouble).detach().requires_grad_(),
                   k_weight = p.k_weight.to(at::kDouble).detach().requires_grad_();
  const at::Tensor cos = p.angles.cos.to(at::kDouble).unsqueeze(1),
                   sin = p.angles.sin.to(at::kDouble).unsqueeze(1);
  const auto heads = [&](int64_t begin, int64_t count) {
    return qkv.slice(1, begin * c.H, (begin + count) * c.H).reshape({c.T, count, c.H});
  };
  const auto turned = [&](at::Tensor x, bool has_norm, const at::Tensor& weight) {
    if (has_norm) x = x / (x.square().mean(-1, true) + 1e-5).sqrt() * weight;
    const at::Tensor a = x.slice(2, 0, c.H / 2), b = x.slice(2, c.H / 2);
    return at::cat({a * cos - b * sin, b * cos + a * sin}, 2);
  };
  const at::Tensor q = turned(heads(0, c.N), c.q_norm, q_weight),
                   k = turned(heads(c.N, c.K), c.k_norm, k_weight), v = heads(c.N + c.K, c.K);
  const auto grads = torch::autograd::grad(
      {q, k, v}, {qkv, q_weight, k_weight},
      {p.grads[0].to(at::kDouble), p.grads[1].to(at::kDouble), p.grads[2].to(at::kDouble)}, std::nullopt,
      false, true);
  const auto or_zero = [](const at::Tensor& g, const at::Tensor& x) {
    return g.defined() ? g : at::zeros_like(x);
  };
  return {q, k, v, grads[0], or_zero(grads[1], q_weight), or_zero(grads[2], k_weight)};
}

std::vector<std::pair<at::Tensor, at::Tensor>> pairs(const Result& a, const Result& b) {
  return {{a.q, b.q},
          {a.k, b.k},
          {a.v, b.v},
          {a.d_qkv, b.d_qkv},
          {a.d_q_weight, b.d_q_weight},
          {a.d_k_weight, b.d_k_weight}};
}

bool same(const Result& a, const Result& b) {
  for (const auto& [x, y] : pairs(a, b))
    if (!at::equal(x, y)) return false;
  return true;
}

// One thread unless a test asks for more: the cases are small, and the machine may be busy.
class Rope : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_F(Rope, AnglesAreFormedInDoublePrecision) {
  const RopeAngles angles = rope_angles(at::tensor({0, 1, 100000}, at::kLong), {1.0, 0.1}, 1.5, at::kFloat);
  EXPECT_EQ(angles.cos.scalar_type(), at::kFloat);
  EXPECT_EQ(angles.cos.sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(angles.cos[0][0].item<float>(), 1.5f);
  EXPECT_EQ(angles.sin[0][1].item<float>(), 0.0f);
  EXPECT_EQ(angles.cos[2][0].item<float>(), static_cast<float>(1.5 * std::cos(100000.0)));
  EXPECT_EQ(angles.sin[2][1].item<float>(), static_cast<float>(1.5 * std::sin(100000 * 0.1)));
  EXPECT_EQ(rope_angles(at::tensor({3}, at::kLong), {0.7}, 1, at::kDouble).sin.item<double>(),
            std::sin(3 * 0.7));
}

TEST_F(Rope, TurnsTheHalvesOfAHead) {
  // H 4: the pairs are (1, 3) and (2, 4); a quarter turn and no turn.  V passes.
  const RopeAngles angles{at::tensor({0.0, 1.0}, at::kDouble).view({1, 2}),
                          at::tensor({1.0, 0.0}, at::kDouble).view({1, 2})};
  const at::Tensor qkv =
      at::tensor({1., 2., 3., 4., 10., 20., 30., 40., 5., 6., 7., 8.}, at::kDouble).view({1, 12});
  const auto [q, k, v] = split_rope(qkv, 1, 1, 4, angles);
  EXPECT_TRUE(at::equal(q.view(-1), at::tensor({-3., 2., 1., 4.}, at::kDouble)));
  EXPECT_TRUE(at::equal(k.view(-1), at::tensor({-30., 20., 10., 40.}, at::kDouble)));
  EXPECT_TRUE(at::equal(v.view(-1), at::tensor({5., 6., 7., 8.}, at::kDouble)));
}

TEST_F(Rope, EqualsThePlainFormulaAndItsGradients) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(fmt::format("T {} N {} K {} H {}", c.T, c.N, c.K, c.H));
    const Problem p(c, at::kDouble);
    for (const auto& [got, want] : pairs(run(c, p), reference(c, p))) {
      ASSERT_EQ(got.sizes(), want.sizes());
      if (got.numel() == 0) continue;
      EXPECT_LT((got - want).abs().max().item<double>(), 1e-11);
    }
  }
}

TEST_F(Rope, LosesNoMoreThanItsDtypeDoes) {
  for (const Case& c : kCases)
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SCOPED_TRACE(fmt::format("T {} N {} K {} H {} {}", c.T, c.N, c.K, c.H, at::toString(dtype)));
      const Problem p(c, dtype);
      const Result got = run(c, p);
      EXPECT_EQ(got.q.scalar_type(), dtype);
      EXPECT_EQ(got.d_q_weight.scalar_type(), at::kFloat);
      for (const auto& [a, b] : pairs(got, reference(c, p))) {
        const double norm = b.norm().item<double>();
        if (norm == 0) continue;
        // bf16 rounds each result once, to 2^-9 at most; the gradients of the weights stay in fp32.
        const double limit = a.scalar_type() == at::kBFloat16 ? 2.5e-3 : 1e-6;
        EXPECT_LT((a.to(at::kDouble) - b).norm().item<double>() / norm, limit);
      }
    }
}

TEST_F(Rope, ThreadsDoNotChangeABit) {
  const Case c{333, 4, 2, 64, true, true};
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Problem p(c, dtype);
    at::set_num_threads(1);
    const Result one = run(c, p);
    for (const int threads : {2, 3}) {
      at::set_num_threads(threads);
      EXPECT_TRUE(same(run(c, p), one));
    }
  }
}

TEST_F(Rope, ARowDoesNotDependOnItsNeighbours) {
  const Case c{40, 4, 2, 64, true, true};
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const Problem p(c, dtype);
    const Result whole = run(c, p);
    Problem part = p;
    part.qkv = p.qkv.slice(0, 17, 19);
    part.angles = {p.angles.cos.slice(0, 17, 19), p.angles.sin.slice(0, 17, 19)};
    for (at::Tensor& g : part.grads) g = g.slice(0, 17, 19);
    const Result got = run(c, part);
    EXPECT_TRUE(at::equal(got.q, whole.q.slice(0, 17, 19)));
    EXPECT_TRUE(at::equal(got.k, whole.k.slice(0, 17, 19)));
    EXPECT_TRUE(at::equal(got.d_qkv, whole.d_qkv.slice(0, 17, 19)));
  }
}

TEST_F(Rope, AsksForTheWeightAgainInBackward) {
  const Case c{9, 2, 1, 32, true, true};
  const Problem p(c, at::kDouble);
  const Result want = run(c, p);
  TestHandle q_norm(p.q_weight), k_norm(p.k_weight.clone(), false);
  k_norm.tensor.copy_(p.k_weight);
  q_norm.deferred = true;
  const at::Tensor qkv = p.qkv.detach().requires_grad_();
  const auto [q, k, v] = split_rope(qkv, c.N, c.K, c.H, p.angles, &q_norm, &k_norm, 1e-5);
  // The buffer is refilled for another block and then for this one again.
  const at::Tensor buffer = q_norm.tensor;
  q_norm.tensor = p.q_weight.clone();
  buffer.fill_(NAN);
  const auto grads = torch::autograd::grad({q, k, v}, {qkv}, {p.grads[0], p.grads[1], p.grads[2]});
  EXPECT_TRUE(at::equal(grads[0], want.d_qkv));
  EXPECT_EQ(q_norm.sink.abs().max().item<double>(), 0);
  q_norm.sink.fill_(2);
  q_norm.run_queue();
  EXPECT_TRUE(at::allclose(q_norm.sink, want.d_q_weight + 2, 1e-12, 1e-12));
  EXPECT_EQ(k_norm.sink.abs().max().item<double>(), 0);  // frozen
}

TEST_F(Rope, TakesAnOutputThatNobodyUses) {
  const Case c{9, 2, 1, 32, false, false};
  const Problem p(c, at::kDouble);
  const at::Tensor qkv = p.qkv.detach().requires_grad_();
  const auto [q, k, v] = split_rope(qkv, c.N, c.K, c.H, p.angles);
  const auto grads = torch::autograd::grad({v}, {qkv}, {p.grads[2]});
  EXPECT_EQ(grads[0].slice(1, 0, 96).abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(grads[0].slice(1, 96).reshape({9, 1, 32}), p.grads[2]));
}

TEST_F(Rope, SaysWhatIsWrong) {
  const Case c{9, 2, 1, 32, false, false};
  const Problem p(c, at::kDouble);
  EXPECT_THROW(split_rope(p.qkv, 2, 2, 32, p.angles), Bug);
  EXPECT_THROW(split_rope(p.qkv, 4, 2, 16, p.angles), Bug);
  EXPECT_THROW(split_rope(p.qkv.to(at::kFloat), 2, 1, 32, p.angles), Bug);
  const TestHandle norm(normal({16}, 9));
  EXPECT_THROW(split_rope(p.qkv, 2, 1, 32, p.angles, &norm, nullptr, 1e-5), Bug);
}

}  // namespace
}  // namespace titanium
