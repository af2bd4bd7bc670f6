// The head, the embedding and norm_linear over ranks, which are threads here, against one rank that holds
// all.
#include <torch/csrc/autograd/autograd.h>

#include <barrier>
#include <cmath>
#include <exception>
#include <thread>

#include "titanium/ops/linear.h"
#include "titanium/ops/linear_logprob.h"
#include "titanium/ops/norm.h"
#include "titanium/ops/test_handle.h"
#include "titanium/ops/test_tensors.h"

namespace titanium {
namespace {

using torch::autograd::grad;

// Threads that gather from each other.
class Ranks {
 public:
  explicit Ranks(int count) : given_(count), barrier_(count) {}

  at::Tensor gather(int rank, const at::Tensor& mine) {
    given_[rank] = mine.detach().clone();
    barrier_.arrive_and_wait();
    at::Tensor all = at::stack(given_);
    barrier_.arrive_and_wait();
    return all;
  }

  // run(rank) on every rank at once.  An Error on one ends the test.
  void run(const std::function<void(int)>& run) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < static_cast<int>(given_.size()); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          run(rank);
        } catch (const std::exception& e) {
          ADD_FAILURE() << "rank " << rank << ": " << e.what();
          barrier_.arrive_and_drop();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::vector<at::Tensor> given_;
  std::barrier<> barrier_;
};

struct Case {
  at::Tensor x, w, labels, temperature;  // [T, D], [V, D], [T], [T]

  Case(int64_t T, int64_t D, int64_t V, at::ScalarType dtype)
      : x(leaf({T, D}, dtype)),
        w((at::randn({V, D}, at::kDouble) * (2 / std::sqrt(static_cast<double>(D)))).to(dtype)),
        labels(at::randint(-1, V, {T}, at::kLong)),
        temperature((at::rand({T}, at::kDouble) + 0.5).to(dtype == at::kDouble ? at::kDouble : at::kFloat)) {}
};

// What one rank, or all of them, gave: a list of outputs, gradients by x and by the whole weight.
struct Given {
  std::vector<at::Tensor> values;
  at::Tensor dx, dw;
};

using Pass = std::function<Given(const Case&, const TestHandle& weight, const VocabSlice* slice)>;

// One rank against the vocabulary cut at `cuts` (0, ..., V); every rank must have the same bits as the first.
void expect_equal_over_slices(const Case& c, const std::vector<int64_t>& cuts, const Pass& pass,
                              double values, double gradients) {
  TestHandle whole(c.w.clone());
  Given want = pass(c, whole, nullptr);
  want.dw = whole.sink;
  const int count = static_cast<int>(cuts.size()) - 1;
  Ranks ranks(count);
  std::vector<Given> got(count);
  ranks.run([&](int rank) {
    Case mine = c;
    mine.x = c.x.detach().clone().requires_grad_();
    TestHandle weight(c.w.narrow(0, cuts[rank], cuts[rank + 1] - cuts[rank]).clone());
    const VocabSlice slice{cuts[rank], c.w.size(0),
                           [&](const at::Tensor& t) { return ranks.gather(rank, t); }};
    got[rank] = pass(mine, weight, &slice);
    weight.run_queue();
    got[rank].dw = weight.sink;
  });
  std::vector<at::Tensor> dw;
  at::Tensor dx = at::zeros_like(want.dx.to(at::kDouble));
  for (const Given& part : got) {
    ASSERT_EQ(part.values.size(), want.values.size());
    for (size_t i = 0; i < want.values.size(); ++i) {
      EXPECT_TRUE(at::equal(part.values[i], got[0].values[i]));
      EXPECT_LT(distance(part.values[i], want.values[i]), values) << "value " << i;
    }
    dx += part.dx.to(at::kDouble);
    dw.push_back(part.dw);
  }
  EXPECT_LT(relative(dx, want.dx), gradients);
  EXPECT_LT(relative(at::cat(dw), want.dw), gradients);
}

const std::vector<std::vector<int64_t>> kCuts = {{0, 50, 101}, {0, 1, 90, 100, 101}, {0, 26, 51, 76, 101}};

Given all_statistics(const Case& c, const TestHandle& weight, const VocabSlice* slice,
                     const at::Tensor& rows = {}) {
  const HeadStats s = linear_logprob(c.x, weight, c.labels, c.temperature, rows, {true, true}, slice);
  const at::Tensor factor = at::arange(1, c.x.size(0) + 1, s.logprob.options()) / c.x.size(0);
  const at::Tensor sum = (factor * s.logprob + 0.3 * s.entropy - factor.square() * s.sum_pi_squared).sum();
  return {{s.logprob.detach(), s.entropy.detach(), s.sum_pi_squared.detach()}, grad({sum}, {c.x})[0], {}};
}

TEST(VocabSlices, StatisticsAndGradients) {
  at::manual_seed(1);
  for (const auto& cuts : kCuts) {
    const Case c(70, 7, 101, at::kDouble);
    expect_equal_over_slices(
        c, cuts, [](const auto&... in) { return all_statistics(in...); }, 1e-12, 1e-12);
  }
  // Slices of more than one group of rows.
  const Case large(20, 8, 5000, at::kDouble);
  expect_equal_over_slices(
      large, {0, 1100, 3500, 5000}, [](const auto&... in) { return all_statistics(in...); }, 1e-12, 1e-12);
}

TEST(VocabSlices, ChosenRowsAndNoRows) {
  at::manual_seed(2);
  const Case c(70, 7, 101, at::kDouble);
  for (const at::Tensor& rows : {at::tensor({0, 3, 66}, at::kLong), at::empty({0}, at::kLong)})
    expect_equal_over_slices(
        c, kCuts[0], [&](const auto&... in) { return all_statistics(in..., rows); }, 1e-12, 1e-12);
}

TEST(VocabSlices, ASliceWithoutAnyLabelAndTokensWithoutOne) {
  at::manual_seed(3);
  Case c(30, 7, 101, at::kDouble);
  c.labels = at::randint(0, 40, {30}, at::kLong);
  c.labels.narrow(0, 10, 5).fill_(-1);
  expect_equal_over_slices(
      c, {0, 40, 101}, [](const auto&... in) { return all_statistics(in...); }, 1e-12, 1e-12);
  c.labels.fill_(-1);
  c.temperature.reset();
  expect_equal_over_slices(
      c, {0, 40, 101}, [](const auto&... in) { return all_statistics(in...); }, 1e-12, 1e-12);
}

TEST(VocabSlices, LogProbsAlone) {
  at::manual_seed(4);
  const Case c(30, 7, 101, at::kDouble);
  const Pass pass = [](const Case& c, const TestHandle& weight, const VocabSlice* slice) {
    const at::Tensor logprob = linear_logprob(c.x, weight, c.labels, {}, {}, {}, slice).logprob;
    return Given{{logprob.detach()}, grad({logprob.sum()}, {c.x})[0], {}};
  };
  expect_equal_over_slices(c, kCuts[2], pass, 1e-12, 1e-12);
}

TEST(VocabSlices, OneSliceHasAlmostAllOfTheProbability) {
  Case c(3, 1, 4, at::kDouble);
  c.x = at::tensor({1.0, -1.0, 0.0}, at::kDouble).view({3, 1}).requires_grad_();
  c.w = at::tensor({2000.0, 0.0, 1.0, -2000.0}, at::kDouble).view({4, 1});
  c.labels = at::tensor({0, 0, 3}, at::kLong);
  expect_equal_over_slices(
      c, {0, 1, 4}, [](const auto&... in) { return all_statistics(in...); }, 1e-12, 1e-12);
}

TEST(VocabSlices, OtherDtypes) {
  at::manual_seed(5);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Case c(70, 64, 2500, dtype);
    // bf16: the gradient by the logits is rounded once and each rank's dx once.
    expect_equal_over_slices(
        c, {0, 1000, 1300, 2500}, [](const auto&... in) { return all_statistics(in...); }, 1e-5,
        dtype == at::kFloat ? 1e-5 : 1e-2);
  }
}

Given nll(const Case& c, const TestHandle& weight, const VocabSlice* slice) {
  const at::Tensor weights = at::arange(1, c.x.size(0) + 1, c.temperature.options()) / c.x.size(0);
  const WeightedNll got = weighted_nll(c.x, weight, c.labels, weights, c.temperature, {}, slice);
  return {{got.loss.detach(), got.logprob}, grad({got.loss}, {c.x})[0], {}};
}

TEST(VocabSlices, WeightedNll) {
  at::manual_seed(6);
  for (const auto& cuts : kCuts)
    expect_equal_over_slices(Case(70, 7, 101, at::kDouble), cuts, nll, 1e-11, 1e-12);
  expect_equal_over_slices(Case(70, 64, 2500, at::kBFloat16), {0, 1000, 2500}, nll, 1e-3, 1e-2);
}

// One slice is short enough that its rank would hold all rows at once, one so long that it takes chunks of
// them: they must agree.
TEST(VocabSlices, WeightedNllInChunksThatAllRanksAgreeOn) {
  at::manual_seed(7);
  expect_equal_over_slices(Case(600, 8, 45000, at::kFloat), {0, 2000, 45000}, nll, 1e-3, 1e-5);
  expect_equal_over_slices(Case(600, 4, 60000, at::kFloat), {0, 500, 60000}, nll, 1e-3,
                           1e-5);  // none is held
}

TEST(VocabSlices, DeferredAndFrozenWeights) {
  at::manual_seed(8);
  const Case c(70, 7, 101, at::kDouble);
  TestHandle whole(c.w.clone());
  all_statistics(c, whole, nullptr);
  Ranks ranks(2);
  ranks.run([&](int rank) {
    Case mine = c;
    mine.x = c.x.detach().clone().requires_grad_();
    const at::Tensor part = c.w.narrow(0, rank * 50, rank == 0 ? 50 : 51);
    const VocabSlice slice{rank * 50, 101, [&](const at::Tensor& t) { return ranks.gather(rank, t); }};
    TestHandle later(part.clone()), frozen(part.clone(), false);
    later.deferred = true;
    all_statistics(mine, later, &slice);
    later.run_queue();
    EXPECT_LT(distance(later.sink, whole.sink.narrow(0, rank * 50, part.size(0))), 1e-12);
    all_statistics(mine, frozen, &slice);
    EXPECT_EQ(frozen.sink.abs().max().item<double>(), 0);
  });
}

TEST(VocabSlices, Logits) {
  at::manual_seed(9);
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    const Case c(5, 40, 101, dtype);
    const at::Tensor want = logits(c.x, TestHandle(c.w));
    Ranks ranks(3);
    const std::vector<int64_t> cuts = {0, 7, 60, 101};
    ranks.run([&](int rank) {
      const TestHandle weight(c.w.narrow(0, cuts[rank], cuts[rank + 1] - cuts[rank]));
      const VocabSlice slice{cuts[rank], 101, [&](const at::Tensor& t) { return ranks.gather(rank, t); }};
      EXPECT_LT(distance(logits(c.x, weight, &slice), want), dtype == at::kDouble ? 1e-12 : 1e-5);
    });
  }
}

TEST(VocabSlices, LabelsBeyondTheWholeVocabularyAreRefused) {
  const TestHandle weight(at::zeros({5, 4}));
  const VocabSlice slice{5, 10, [](const at::Tensor& t) { return t.unsqueeze(0); }};
  const at::Tensor x = at::zeros({1, 4});
  EXPECT_NO_THROW(linear_logprob(x, weight, at::tensor({9}, at::kLong), {}, {}, {}, &slice));
  EXPECT_THROW(linear_logprob(x, weight, at::tensor({10}, at::kLong), {}, {}, {}, &slice), BadData);
}

TEST(VocabSlices, EmbeddingIsTheSumOverRanks) {
  at::manual_seed(10);
  const at::Tensor w = at::randn({101, 8}, at::kDouble), ids = at::randint(0, 101, {40}, at::kLong);
  const at::Tensor anchor = at::empty({0}, at::kDouble).requires_grad_(), g = at::randn({40, 8}, at::kDouble);
  TestHandle whole(w);
  const at::Tensor want = embedding(ids, whole, anchor);
  grad({want}, {anchor}, {g}, std::nullopt, false, true);
  at::Tensor sum = at::zeros_like(want);
  const std::vector<int64_t> cuts = {0, 1, 60, 101};
  for (int rank = 0; rank < 3; ++rank) {
    const int64_t n = cuts[rank + 1] - cuts[rank];
    TestHandle weight(w.narrow(0, cuts[rank], n));
    const VocabSlice slice{cuts[rank], 101, {}};
    const at::Tensor mine = embedding(ids, weight, anchor, &slice);
    grad({mine}, {anchor}, {g}, std::nullopt, false, true);
    EXPECT_TRUE(at::equal(weight.sink, whole.sink.narrow(0, cuts[rank], n)));
    sum += mine.detach();
    const at::AutoGradMode off(false);
    EXPECT_TRUE(at::equal(embedding(ids, weight, anchor, &slice), mine));
    EXPECT_THROW(embedding(at::tensor({101}, at::kLong), weight, anchor, &slice), BadData);
  }
  EXPECT_TRUE(at::equal(sum, want));
}

// Ranks hold rows of x and rows of the weight: outputs side by side, gradients of the norm weight to be
// summed.
TEST(RowExchange, NormLinearOverCutTokens) {
  at::manual_seed(11);
  const int64_t T = 12, D = 8, O = 10;
  const at::Tensor x = leaf({T, D}), w = at::randn({O, D}, at::kDouble), b = at::randn({O}, at::kDouble);
  const at::Tensor g = at::randn({T, O}, at::kDouble), n = at::randn({D}, at::kDouble);
  TestHandle norm(n), weight(w), bias(b);
  const at::Tensor want = norm_linear(x, norm, 1e-6, weight, &bias);
  const at::Tensor dx = grad({want}, {x}, {g})[0];
  Ranks ranks(2);
  std::vector<at::Tensor> norm_gradients(2);
  ranks.run([&](int rank) {
    const auto rows = [&](const at::Tensor& t) { return t.narrow(0, rank * T / 2, T / 2); };
    const auto part = [&](const at::Tensor& t) { return t.narrow(0, rank == 0 ? 0 : 4, rank == 0 ? 4 : 6); };
    const RowExchange exchange{
        [&](const at::Tensor& mine) { return ranks.gather(rank, mine).flatten(0, 1); },
        [&](const at::Tensor& partial) { return rows(ranks.gather(rank, partial).sum(0)).contiguous(); }};
    TestHandle my_norm(n), my_weight(part(w)), my_bias(part(b));
    const at::Tensor mine = rows(x.detach()).clone().requires_grad_();
    const at::Tensor y = norm_linear(mine, my_norm, 1e-6, my_weight, &my_bias, &exchange);
    const at::Tensor columns = g.narrow(1, rank == 0 ? 0 : 4, rank == 0 ? 4 : 6);
    EXPECT_LT(distance(y, want.narrow(1, rank == 0 ? 0 : 4, rank == 0 ? 4 : 6)), 1e-12);
    EXPECT_LT(distance(grad({y}, {mine}, {columns})[0], rows(dx)), 1e-12);
    EXPECT_LT(distance(my_weight.sink, part(weight.sink)), 1e-12);
    EXPECT_LT(distance(my_bias.sink, part(bias.sink)), 1e-12);
    norm_gradients[rank] = my_norm.sink;
    const at::AutoGradMode off(false);
    EXPECT_TRUE(at::equal(norm_linear(mine, my_norm, 1e-6, my_weight, &my_bias, &exchange), y));
  });
  EXPECT_LT(distance(norm_gradients[0] + norm_gradients[1], norm.sink), 1e-12);
}

// Two ranks with half of the columns each, in bf16, against one with all.  Sums of parts that were rounded
// before would differ from the whole in about a third of the entries; the order of the fp32 sum, in few.
TEST(RowExchange, SumsOverRanksAreRoundedOnce) {
  at::manual_seed(12);
  const int64_t T = 32, F = 256, D = 96;
  const auto half = [](const at::Tensor& t) { return t.to(at::kBFloat16); };
  const at::Tensor x = half(at::randn({T, F})), w = half(at::randn({D, F}) / 16), r = half(at::randn({T, D})),
                   g = half(at::randn({T, D})), n = half(at::ones({D})), b = half(at::randn({D}));
  const auto mostly_equal = [](const at::Tensor& got, const at::Tensor& want) {
    EXPECT_GT(got.eq(want).to(at::kDouble).mean().item<double>(), 0.97);
  };
  const at::Tensor whole_x = x.detach().clone().requires_grad_(),
                   whole_r = r.detach().clone().requires_grad_();
  TestHandle weight(w), bias(b), up(w.t().contiguous()), norm(n);
  const at::Tensor y = linear(whole_x, weight, &bias, whole_r);
  const at::Tensor dx = grad({y}, {whole_x}, {g})[0];
  const at::Tensor by_norm =
      grad({norm_linear(whole_r, norm, 1e-6, up)}, {whole_r}, {half(at::ones({T, F}))})[0];
  Ranks ranks(2);
  ranks.run([&](int rank) {
    const auto rows = [&](const at::Tensor& t) { return t.narrow(0, rank * T / 2, T / 2); };
    const auto columns = [&](const at::Tensor& t) { return t.narrow(1, rank * F / 2, F / 2).contiguous(); };
    const RowExchange exchange{
        [&](const at::Tensor& mine) { return ranks.gather(rank, mine).flatten(0, 1); },
        [&](const at::Tensor& partial) { return rows(ranks.gather(rank, partial).sum(0)).contiguous(); }};
    TestHandle my_weight(columns(w)), my_bias(b), my_up(columns(w).t().contiguous()), my_norm(n);
    const at::Tensor mine = columns(x).requires_grad_(), my_r = rows(r).clone().requires_grad_();
    const at::Tensor sum = linear(mine, my_weight, &my_bias, my_r, &exchange);
    ASSERT_EQ(sum.scalar_type(), at::kBFloat16);
    mostly_equal(sum, rows(y));
    mostly_equal(grad({sum}, {mine}, {rows(g)})[0], columns(dx));
    const at::Tensor z = norm_linear(my_r, my_norm, 1e-6, my_up, nullptr, &exchange);
    mostly_equal(grad({z}, {my_r}, {half(at::ones({T, F / 2}))})[0], rows(by_norm));
  });
}

}  // namespace
}  // namespace titanium
