#include "titanium/optim/clip.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <limits>

#include "titanium/base/random.h"

namespace titanium {
namespace {

struct Fixture {
  explicit Fixture(at::ScalarType dtype = at::kFloat) {
    const Weight* embed = table.add("embed", {100, 70}, Split::kRows, {}, 0);
    table.add("matrix", {300, 333}, Split::kRows, {}, 1);
    table.add("norm", {33}, Split::kWhole, {Init::kOnes}, 1);
    table.share(embed, 1);
    StoreOptions options;
    options.dtypes = {dtype, dtype, dtype};
    store = std::make_unique<ParamStore>(table, 2, options);
    store->zero_grad();
    for (const auto& weight : table.weights()) {
      const Random random(5, Purpose::kTest, hash_name(weight->name().data(), weight->name().size()));
      const at::Tensor grad = weight->unit().grad_view(weight->offset(), {weight->numel()});
      for (int64_t i = 0; i < weight->numel(); ++i) {
        const double value = random.normal(i);
        grad[i] = value;
        squares += dtype == at::kFloat ? std::pow(static_cast<float>(value), 2.0) : value * value;
      }
    }
  }
  at::Tensor grad(const std::string& name) {
    const Weight& w = store->weight(name);
    return w.unit().grad_view(w.offset(), {w.numel()});
  }
  WeightTable table;
  std::unique_ptr<ParamStore> store;
  double squares = 0;
};

TEST(GradNorm, IsTheRootOfAllSquaresInFp64) {
  Fixture narrow;
  EXPECT_NEAR(grad_norm(*narrow.store).value, std::sqrt(narrow.squares), 1e-12 * std::sqrt(narrow.squares));
  Fixture wide(at::kDouble);
  EXPECT_NEAR(grad_norm(*wide.store).value, std::sqrt(wide.squares), 1e-12 * std::sqrt(wide.squares));
  // Squares that fp32 cannot hold.
  narrow.grad("norm")[0] = 1e30;
  EXPECT_NEAR(grad_norm(*narrow.store).value, 1e30, 1e23);
}

TEST(GradNorm, DoesNotDependOnTheNumberOfThreads) {
  Fixture f;
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double one = grad_norm(*f.store).value;
  for (int threads : {2, 3, 7}) {
    at::set_num_threads(threads);
    EXPECT_EQ(grad_norm(*f.store).value, one) << threads << " threads";
  }
  at::set_num_threads(before);
}

TEST(GradNorm, NamesWhatIsNotFinite) {
  Fixture f;
  f.grad("matrix")[1234] = std::numeric_limits<double>::quiet_NaN();
  f.grad("matrix")[1235] = 0;
  f.grad("norm")[7] = -std::numeric_limits<double>::infinity();
  const GradNorm norm = grad_norm(*f.store);
  EXPECT_FALSE(norm.finite());
  ASSERT_EQ(norm.bad.size(), 2u);
  EXPECT_EQ(norm.bad[0].name, "matrix");
  EXPECT_EQ(norm.bad[0].index, 1234);
  EXPECT_TRUE(std::isnan(norm.bad[0].value));
  EXPECT_EQ(norm.bad[1].index, 7);
  EXPECT_EQ(norm.describe(), "gradient norm nan: matrix[1234] = nan, norm[7] = -inf");
}

TEST(GradNorm, NamesFiveAtMost) {
  WeightTable table;
  for (int i = 0; i < 8; ++i) table.add(fmt::format("w{}", i), {4}, Split::kWhole, {}, 0);
  ParamStore store(table, 1, {});
  store.zero_grad();
  store.unit(0).grad_view(0, {store.unit(0).numel()}).fill_(std::numeric_limits<double>::infinity());
  EXPECT_EQ(grad_norm(store).bad.size(), 5u);
}

TEST(GradNorm, FrozenWeightsAndNoGradientsCountNothing) {
  Fixture f;
  f.store->release_grad();
  EXPECT_EQ(grad_norm(*f.store).value, 0);
}

TEST(ClipCoefficient, FollowsTorch) {
  EXPECT_DOUBLE_EQ(clip_coefficient(4, 1), 1 / (4 + 1e-6));
  EXPECT_EQ(clip_coefficient(0.5, 1), 1);
  EXPECT_DOUBLE_EQ(clip_coefficient(1, 1), 1 / (1 + 1e-6));
  EXPECT_EQ(clip_coefficient(100, 0), 1);
}

}  // namespace
}  // namespace titanium
