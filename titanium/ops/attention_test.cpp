#include "titanium/ops/attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/ops/vector.h"

namespace titanium {
namespace {

at::Tensor normal(at::IntArrayRef sizes, uint64_t stream) {
  at::Tensor x = at::empty(sizes, at::kDouble);
  const Random random(7, Purpose::kTest, stream);
  double* p = x.mutable_data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) p[i] = random.normal(i);
  return x;
}

std::vector<int64_t> bounds(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> result = {0};
  for (int64_t n : lengths) result.push_back(result.back() + n);
  return result;
}

struct Case {
  int64_t N, K, H;
  std::vector<int64_t> queries, keys;  // of each document; no keys = as many as queries
  int64_t window = 0;
  double scale = 0;
};

struct Problem {
  at::Tensor q, k, v, grad;  // grad: of the output
  AttentionSpec spec;

  explicit Problem(const Case& c, at::ScalarType dtype = at::kDouble) {
    spec.q_bounds = bounds(c.queries);
    spec.k_bounds = bounds(c.keys.empty() ? c.queries : c.keys);
    spec.window = c.window;
    spec.scale = c.scale;
    q = normal({spec.q_bounds.back(), c.N, c.H}, 1).to(dtype);
    k = normal({spec.k_bounds.back(), c.K, c.H}, 2).to(dtype);
    v = normal({spec.k_bounds.back(), c.K, c.H}, 3).to(dtype);
    grad = normal({spec.q_bounds.back(), c.N, c.H}, 4).to(dtype);
  }
};

// Plain attention over documents and heads, in fp64, for autograd to differentiate.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionSpec& spec) {
  const int64_t group = q.size(1) / k.size(1);
  const double scale = spec.scale == 0 ? 1 / std::sqrt(static_cast<double>(q.size(2))) : spec.scale;
  std::vector<at::Tensor> documents = {q.slice(0, 0, 0)};
  for (size_t d = 0; d + 1 < spec.q_bounds.size(); ++d) {
    const at::Tensor x = q.slice(0, spec.q_bounds[d], spec.q_bounds[d + 1]);
    const at::Tensor y = k.slice(0, spec.k_bounds[d], spec.k_bounds[d + 1]).repeat_interleave(group, 1);
    const at::Tensor z = v.slice(0, spec.k_bounds[d], spec.k_bounds[d + 1]).repeat_interleave(group, 1);
    if (x.size(0) == 0) continue;
    const at::Tensor scores = at::einsum("qnh,knh->nqk", {x, y}) * scale;
    const at::Tensor distance =
        at::arange(y.size(0) - x.size(0), y.size(0)).unsqueeze(1) - at::arange(y.size(0));
    at::Tensor hidden = distance.lt(0);
    if (spec.window > 0) hidden = hidden.logical_or(distance.ge(spec.window));
    const at::Tensor weights = scores.masked_fill(hidden, -INFINITY).softmax(-1);
    documents.push_back(at::einsum("nqk,knh->qnh", {weights, z}));
  }
  return at::cat(documents);
}

struct Result {
  at::Tensor out, dq, dk, dv;
};

template <typename F>
Result differentiate(const Problem& p, const F& f) {
  const at::Tensor q = p.q.detach().requires_grad_(), k = p.k.detach().requires_grad_(),
                   v = p.v.detach().requires_grad_();
  const at::Tensor out = f(q, k, v, p.spec);
  const auto grads = torch::autograd::grad({out}, {q, k, v}, {p.grad}, std::nullopt, false, true);
  const auto or_zero = [](const at::Tensor& g, const at::Tensor& x) {
    return g.defined() ? g : at::zeros_like(x);
  };
  return {out.detach(), or_zero(grads[0], q), or_zero(grads[1], k), or_zero(grads[2], v)};
}

double worst(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() == 0 ? 0 : (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
}
// Of the vectors as a whole.
double relative(const at::Tensor& a, const at::Tensor& b) {
  return ((a.to(at::kDouble) - b.to(at::kDouble)).norm() / b.to(at::kDouble).norm()).item<double>();
}
// To the bit, NaN and the sign of zero apart.
bool same(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a, b);
}
bool same(const Result& a, const Result& b) {
  return same(a.out, b.out) && same(a.dq, b.dq) && same(a.dk, b.dk) && same(a.dv, b.dv);
}

const std::vector<at::ScalarType> kDtypes = {at::kBFloat16, at::kFloat, at::kDouble};

const std::vector<Case> kCases = {
    {1, 1, 32, {1}, {}},
    {2, 1, 64, {65}, {}},
    {9, 3, 64, {17, 5, 1}, {}},
    {9, 3, 64, {200, 64, 63, 1, 129}, {}},
    {4, 4, 128, {130, 3}, {}},
    {8, 2, 128, {70, 70}, {}},
    {3, 1, 20, {90, 7}, {}},
    {2, 2, 33, {67}, {}},
    {4, 2, 1, {66, 2}, {}},
    {2, 1, 256, {40}, {}},
    {7, 1, 48, {33, 100}, {}},
    {4, 2, 64, {150, 20}, {}, 1},
    {4, 2, 64, {300, 20}, {}, 17},
    {6, 2, 32, {200, 129}, {}, 64},
    {6, 2, 32, {200}, {}, 65},
    {6, 2, 32, {130}, {}, 1000},
    {6, 3, 32, {1, 1, 1}, {1, 70, 200}},
    {6, 3, 32, {20, 3, 0, 5}, {100, 3, 7, 64}},
    {6, 3, 64, {100, 1}, {300, 150}, 33},
    {4, 2, 32, {0, 10, 0, 0, 3, 0}, {}},
    {2, 2, 32, {80}, {}, 0, 0.9},
    {16, 1, 32, {260, 30}, {}},  // several units of backward a key head
};

// One thread unless a test asks for more: the cases are small, and the machine may be busy.
class Attention : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
  void TearDown() override { at::set_num_threads(threads_); }

 private:
  int threads_ = at::get_num_threads();
};

TEST_F(Attention, EqualsThePlainFormulaAndItsGradients) {
  for (size_t i = 0; i < kCases.size(); ++i) {
    SCOPED_TRACE(i);
    const Problem p(kCases[i]);
    const Result got = differentiate(p, attention), want = differentiate(p, reference);
    EXPECT_LT(worst(got.out, want.out), 1e-12);
    EXPECT_LT(worst(got.dq, want.dq), 1e-12);
    EXPECT_LT(worst(got.dk, want.dk), 1e-11);
    EXPECT_LT(worst(got.dv, want.dv), 1e-11);
  }
}

TEST_F(Attention, GradientsEqualFiniteDifferences) {
  Problem p({6, 2, 20, {9, 1}, {80, 4}, 50});
  const Result got = differentiate(p, attention);
  const auto loss = [&] { return (attention(p.q, p.k, p.v, p.spec) * p.grad).sum().item<double>(); };
  const std::pair<at::Tensor, at::Tensor> pairs[] = {{p.q, got.dq}, {p.k, got.dk}, {p.v, got.dv}};
  for (const auto& [x, dx] : pairs)
    for (int64_t i = 3; i < x.numel(); i += 97) {
      double* at = x.mutable_data_ptr<double>() + i;
      const double before = *at, step = 1e-4;
      const auto with = [&](double d) {
        *at = before + d;
        const double value = loss();
        *at = before;
        return value;
      };
      // Of order 4, so that its own error is below 1e-10.
      const double slope =
          (8 * (with(step) - with(-step)) - (with(2 * step) - with(-2 * step))) / (12 * step);
      EXPECT_NEAR(dx.reshape(-1)[i].item<double>(), slope, 1e-9);
    }
}

TEST_F(Attention, LosesNoMoreThanItsDtypeDoes) {
  // Against fp64 on the same rounded inputs.  A bf16 result is rounded once (2^-9 at most), its weights
  // before that.
  for (size_t i = 0; i < kCases.size(); ++i)
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
      SCOPED_TRACE(fmt::format("case {} {}", i, at::toString(dtype)));
      const Problem p(kCases[i], dtype);
      Problem wide = p;
      for (at::Tensor* x : {&wide.q, &wide.k, &wide.v, &wide.grad}) *x = x->to(at::kDouble);
      const Result got = differentiate(p, attention), want = differentiate(wide, reference);
      const double limit = dtype == at::kFloat ? 2e-6 : 6e-3;
      EXPECT_EQ(got.out.scalar_type(), dtype);
      EXPECT_LT(relative(got.out, want.out), limit);
      EXPECT_LT(relative(got.dv, want.dv), limit);
      if (want.dq.abs().max().item<double>() < 1e-10)
        continue;  // one key: the gradients of the scores are zero
      EXPECT_LT(relative(got.dq, want.dq), limit * 2);
      EXPECT_LT(relative(got.dk, want.dk), limit * 2);
    }
}

TEST_F(Attention, SurvivesLargeScores) {
  for (const at::ScalarType dtype : kDtypes) {
    Problem p({2, 1, 64, {150}, {}}, dtype);
    p.q = p.q * 300;
    Problem wide = p;
    for (at::Tensor* x : {&wide.q, &wide.k, &wide.v, &wide.grad}) *x = x->to(at::kDouble);
    const Result got = differentiate(p, attention), want = differentiate(wide, reference);
    EXPECT_TRUE(at::isfinite(got.dq).all().item<bool>() && at::isfinite(got.dk).all().item<bool>());
    EXPECT_LT(relative(got.out, want.out), dtype == at::kDouble ? 1e-11 : dtype == at::kFloat ? 1e-4 : 6e-3);
  }
}

TEST_F(Attention, DocumentsDoNotSeeEachOther) {
  // Documents of 17, 5 and 1 tokens; every token of the first is changed.
  for (const at::ScalarType dtype : kDtypes) {
    const Problem p({9, 3, 64, {17, 5, 1}, {}}, dtype);
    Problem other = p;
    for (at::Tensor* x : {&other.q, &other.k, &other.v, &other.grad}) {
      *x = x->clone();
      x->slice(0, 0, 17).mul_(-3).add_(1);
    }
    const Result a = differentiate(p, attention), b = differentiate(other, attention);
    EXPECT_FALSE(same(a.out.slice(0, 0, 17), b.out.slice(0, 0, 17)));
    const auto rest = [](const at::Tensor& x) { return x.slice(0, 17); };
    EXPECT_TRUE(same({rest(a.out), rest(a.dq), rest(a.dk), rest(a.dv)},
                     {rest(b.out), rest(b.dq), rest(b.dk), rest(b.dv)}));

    Problem alone = p;  // the second document by itself
    for (at::Tensor* x : {&alone.q, &alone.k, &alone.v, &alone.grad}) *x = x->slice(0, 17, 22);
    alone.spec.q_bounds = alone.spec.k_bounds = {0, 5};
    const auto second = [](const at::Tensor& x) { return x.slice(0, 17, 22); };
    EXPECT_TRUE(
        same(differentiate(alone, attention), {second(a.out), second(a.dq), second(a.dk), second(a.dv)}));
  }
}

TEST_F(Attention, ADocumentIsTheSameInAnyPack) {
  for (const at::ScalarType dtype : kDtypes)
    for (const int64_t length : {1, 3, 40, 64, 65, 300}) {
      const Problem p({6, 2, 64, {100, length, 33}, {}}, dtype);
      Problem alone = p;
      for (at::Tensor* x : {&alone.q, &alone.k, &alone.v, &alone.grad}) *x = x->slice(0, 100, 100 + length);
      alone.spec.q_bounds = alone.spec.k_bounds = {0, length};
      const Result a = differentiate(p, attention);
      const auto middle = [&](const at::Tensor& x) { return x.slice(0, 100, 100 + length); };
      EXPECT_TRUE(
          same(differentiate(alone, attention), {middle(a.out), middle(a.dq), middle(a.dk), middle(a.dv)}))
          << at::toString(dtype) << " " << length;
    }
}

TEST_F(Attention, DecodingGivesTheBitsOfThePrefill) {
  for (const at::ScalarType dtype : kDtypes)
    for (const Case& c : {Case{9, 3, 64, {210}, {}}, Case{2, 2, 128, {140}, {}, 70},
                          Case{6, 1, 20, {130}, {}}, Case{40, 1, 32, {70}, {}}}) {
      const Problem p(c, dtype);
      const int64_t length = c.queries[0];
      const at::Tensor whole = attention(p.q, p.k, p.v, p.spec);
      for (const int64_t step : {1, 2, 7, 64}) {
        std::vector<at::Tensor> parts;
        for (int64_t t = 0; t < length; t += step) {
          const int64_t end = std::min(length, t + step);
          AttentionSpec spec = p.spec;
          spec.q_bounds = {0, end - t};
          spec.k_bounds = {0, end};
          parts.push_back(attention(p.q.slice(0, t, end), p.k.slice(0, 0, end), p.v.slice(0, 0, end), spec));
        }
        EXPECT_TRUE(same(at::cat(parts), whole)) << at::toString(dtype) << " N " << c.N << " step " << step;
      }
    }
}

// Keys of documents that lie in a cache, in any order and with room between them.
TEST_F(Attention, KeysMayLieApart) {
  for (const at::ScalarType dtype : kDtypes)
    for (const Case& c : {Case{9, 3, 64, {1, 5, 1}, {70, 5, 130}}, Case{4, 2, 40, {3, 1}, {3, 64}, 20}}) {
      const Problem p(c, dtype);
      AttentionSpec spec = p.spec;
      int64_t end = 3;
      for (size_t d = spec.q_bounds.size() - 1; d-- > 0;) {
        spec.k_starts.insert(spec.k_starts.begin(), end);
        end += spec.k_bounds[d + 1] - spec.k_bounds[d] + 7;
      }
      const auto apart = [&](const at::Tensor& together) {
        const at::Tensor cache = at::full({end, together.size(1), together.size(2)}, NAN, together.options());
        for (size_t d = 0; d < spec.k_starts.size(); ++d) {
          const int64_t n = spec.k_bounds[d + 1] - spec.k_bounds[d];
          cache.narrow(0, spec.k_starts[d], n).copy_(together.narrow(0, spec.k_bounds[d], n));
        }
        return cache;
      };
      EXPECT_TRUE(same(attention(p.q, apart(p.k), apart(p.v), spec), attention(p.q, p.k, p.v, p.spec)))
          << at::toString(dtype);
      const at::Tensor leaf = p.q.detach().clone().requires_grad_();
      EXPECT_THROW(attention(leaf, apart(p.k), apart(p.v), spec), Bug);
      spec.k_starts[0] = end;
      EXPECT_THROW(attention(p.q, apart(p.k), apart(p.v), spec), Bug);
      spec.k_starts.pop_back();
      EXPECT_THROW(attention(p.q, apart(p.k), apart(p.v), spec), Bug);
    }
}

TEST_F(Attention, ThreadsDoNotChangeABit) {
  for (const at::ScalarType dtype : kDtypes)
    for (const Case& c : {Case{6, 2, 64, {900, 40, 333}, {}}, Case{8, 8, 32, {128, 5}, {300, 5}, 50}}) {
      const Problem p(c, dtype);
      at::set_num_threads(1);
      const Result one = differentiate(p, attention);
      for (const int threads : {2, 3, 2}) {
        at::set_num_threads(threads);
        EXPECT_TRUE(same(differentiate(p, attention), one)) << at::toString(dtype) << " " << threads;
      }
    }
}

TEST_F(Attention, ReadsNothingThatIsNotGiven) {
  // Inputs lie inside buffers of NaN, and memory that is freed for the op to find is NaN.
  for (const at::ScalarType dtype : kDtypes)
    for (const Case& c : {Case{9, 3, 64, {17, 70, 1}, {}}, Case{4, 2, 40, {3, 5}, {90, 64}}}) {
      const Problem p(c, dtype);
      const Result want = differentiate(p, attention);
      Problem inside = p;
      for (at::Tensor* x : {&inside.q, &inside.k, &inside.v, &inside.grad}) {
        const at::Tensor buffer = at::full({x->size(0) + 130, x->size(1), x->size(2)}, NAN, x->options());
        const at::Tensor view = buffer.slice(0, 65, 65 + x->size(0));
        view.copy_(*x);
        *x = view;
      }
      for (int i = 0; i < 3; ++i) {
        std::vector<at::Tensor> poison;
        for (int64_t n = 64; n < (1 << 21); n = n * 3 / 2) poison.push_back(at::full({n}, NAN, at::kFloat));
        poison.clear();
        EXPECT_TRUE(same(differentiate(inside, attention), want)) << at::toString(dtype);
      }
    }
}

TEST_F(Attention, TakesStridedInputs) {
  const Problem p({4, 2, 32, {50, 9}, {}});
  Problem strided = p;
  for (at::Tensor* x : {&strided.q, &strided.k, &strided.v, &strided.grad})
    *x = x->transpose(0, 1).contiguous().transpose(0, 1);
  EXPECT_TRUE(same(differentiate(strided, attention), differentiate(p, attention)));
}

TEST_F(Attention, KeepsNoGraphWithoutGradients) {
  const Problem p({4, 2, 32, {50}, {}});
  EXPECT_FALSE(attention(p.q, p.k, p.v, p.spec).requires_grad());
}

TEST_F(Attention, SaysWhatIsWrong) {
  const Problem p({4, 2, 32, {50, 9}, {}});
  const auto message = [&](const at::Tensor& q, const at::Tensor& k,
                           const AttentionSpec& spec) -> std::string {
    try {
      attention(q, k, p.v, spec);
    } catch (const Bug& bug) {
      return bug.what();
    }
    return "";
  };
  AttentionSpec spec = p.spec;
  spec.q_bounds = {0, 50, 58};
  EXPECT_NE(message(p.q, p.k, spec).find("q_bounds must run from 0 to 59"), std::string::npos);
  spec.q_bounds = {0, 60, 59};
  EXPECT_NE(message(p.q, p.k, spec).find("document 1 runs from 60 to 59"), std::string::npos);
  spec = p.spec;
  spec.k_bounds = {0, 49, 59};
  EXPECT_NE(message(p.q, p.k, spec).find("document 0 has 50 queries and only 49 keys"), std::string::npos);
  spec = p.spec;
  spec.scale = -1;
  EXPECT_NE(message(p.q, p.k, spec).find("scale must be positive"), std::string::npos);
  EXPECT_NE(message(p.q, p.k.to(at::kFloat), p.spec).find("one dtype"), std::string::npos);
  EXPECT_NE(message(p.q.slice(1, 0, 3), p.k, p.spec).find("K dividing N"), std::string::npos);
}

TEST(Vector, Exp2IsWithinTwoUlp) {
  double worst_fp32 = 0, worst_fp64 = 0;
  for (int64_t i = 0; i < 400000; i += 16) {
    Vector<float> x;
    for (int lane = 0; lane < 16; ++lane)
      x[lane] = static_cast<float>(-125.9 + (i + lane) * (150.0 / 400000));
    const Vector<float> y = exp2(x);
    for (int lane = 0; lane < 16; ++lane) {
      const double exact = std::exp2(static_cast<double>(x[lane]));
      const double ulp = std::exp2(std::floor(static_cast<double>(x[lane])) - 23);
      worst_fp32 = std::max(worst_fp32, std::abs(y[lane] - exact) / ulp);
    }
    Vector<double> z;
    for (int lane = 0; lane < 8; ++lane) z[lane] = -1000 + (i + lane) * (1100.0 / 400000);
    const Vector<double> w = exp2(z);
    for (int lane = 0; lane < 8; ++lane) {
      const long double exact = std::exp2(static_cast<long double>(z[lane]));
      const double ulp = std::exp2(std::floor(z[lane]) - 52);
      worst_fp64 = std::max(worst_fp64, static_cast<double>(std::abs(w[lane] - exact)) / ulp);
    }
  }
  EXPECT_LT(worst_fp32, 2);
  EXPECT_LT(worst_fp64, 2);
}

TEST(Vector, Exp2KnowsItsEnds) {
  const float inf = INFINITY;
  const Vector<float> x = {0, -inf, -126, -126.5f, -1e30f, 1, -1, 8, NAN, -150, 126, -0.0f, 0, 0, 0, 0};
  const Vector<float> y = exp2(x);
  EXPECT_EQ(y[0], 1);
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[2], std::ldexp(1.0f, -126));
  EXPECT_EQ(y[3], 0);
  EXPECT_EQ(y[4], 0);
  EXPECT_EQ(y[5], 2);
  EXPECT_EQ(y[6], 0.5f);
  EXPECT_EQ(y[7], 256);
  EXPECT_TRUE(std::isnan(y[8]));
  EXPECT_EQ(y[9], 0);
  EXPECT_EQ(y[10], std::ldexp(1.0f, 126));
  EXPECT_EQ(y[11], 1);
}

TEST(Vector, NarrowingRoundsToNearestEven) {
  Vector<float> x = {1,        1 + 0x1p-8f, 1 + 3 * 0x1p-8f, 1 + 0x1p-8f + 0x1p-20f, -1 - 0x1p-8f,
                     INFINITY, NAN,         0x1.ffp127f};
  at::BFloat16 got[16];
  store_narrow(got, x);
  for (int i = 0; i < 16; ++i) {
    const float want = static_cast<float>(at::BFloat16(x[i])), have = static_cast<float>(got[i]);
    EXPECT_TRUE(have == want || (std::isnan(have) && std::isnan(want))) << x[i];
  }
}

}  // namespace
}  // namespace titanium
