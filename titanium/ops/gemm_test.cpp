// Products by blocks, of every kind of block, at shapes with and without edges, against fp64.
#include "titanium/ops/gemm.h"

#include <tuple>

#include "titanium/ops/test_tensors.h"

namespace titanium {
namespace {

template <typename Stored, typename Block>
struct Types {
  using S = Stored;
  using P = Block;
};

template <typename T>
struct Gemm : testing::Test {
  // a, b: how the operands lie.  Returns a b by blocks, added twice to `start`.
  at::Tensor twice(const at::Tensor& a, bool a_transposed, const at::Tensor& b, bool b_transposed,
                   const at::Tensor& start) {
    using S = typename T::S;
    using P = typename T::P;
    if (std::is_same_v<P, at::BFloat16> && !has_bf16_tiles()) return {};
    const int64_t M = a.size(a_transposed ? 1 : 0), K = a.size(a_transposed ? 0 : 1),
                  N = b.size(b_transposed ? 0 : 1);
    const at::Tensor out = start.to(c10::CppTypeToScalarType<Wide<P>>::value).clone();
    Right<P> right(K, N);
    for_blocks(right.blocks, [&](int64_t n) {
      if (b_transposed) {
        right.fill_transposed(n, Rows<S>(b));
      } else {
        right.fill(n, Rows<S>(b));
      }
    });
    Left<P> left = a_transposed ? Left<P>(K, M) : Left<P>(Rows<S>(a));
    if (a_transposed) for_blocks(left.blocks(), [&](int64_t m) { left.fill_transposed(m, Rows<S>(a)); });
    for (int i = 0; i < 2; ++i)
      add_product(left, right, out.template mutable_data_ptr<Wide<P>>(), out.stride(0));
    return out;
  }
};

using Kinds = testing::Types<Types<at::BFloat16, at::BFloat16>, Types<at::BFloat16, float>,
                             Types<float, float>, Types<double, double>>;
TYPED_TEST_SUITE(Gemm, Kinds);

TYPED_TEST(Gemm, EveryLieAndEdge) {
  at::manual_seed(1);
  const at::ScalarType dtype = c10::CppTypeToScalarType<typename TypeParam::S>::value;
  const double tolerance = dtype == at::kDouble ? 1e-12 : 2e-6;
  for (const auto& [M, N, K] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{{1, 1, 1},
                                                                                  {64, 128, 512},
                                                                                  {65, 129, 513},
                                                                                  {17, 31, 33},
                                                                                  {130, 200, 50},
                                                                                  {48, 96, 1100},
                                                                                  {3, 577, 64}})
    for (const bool at_lies : {false, true})
      for (const bool bt_lies : {false, true}) {
        // A view of a wider tensor, so that rows do not follow each other.
        const auto matrix = [&](int64_t rows, int64_t columns) {
          return at::randn({rows, columns + 6}, at::kDouble).to(dtype).narrow(1, 4, columns);
        };
        const at::Tensor a = at_lies ? matrix(K, M) : matrix(M, K), b = bt_lies ? matrix(N, K) : matrix(K, N);
        const at::Tensor start = at::randn({M, N}, at::kDouble);
        const at::Tensor got = this->twice(a, at_lies, b, bt_lies, start);
        if (!got.defined()) continue;
        const at::Tensor wa = a.to(at::kDouble), wb = b.to(at::kDouble);
        const at::Tensor want = start + 2 * at::mm(at_lies ? wa.t() : wa, bt_lies ? wb.t() : wb);
        EXPECT_LT(relative(got, want), tolerance) << M << " " << N << " " << K << at_lies << bt_lies;
      }
}

}  // namespace
}  // namespace titanium
