#include "titanium/ops/scratch.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titanium/ops/products.h"

namespace titanium {
namespace {

constexpr int64_t kMiB = 1 << 20;

at::Tensor mebibytes(int64_t n) {
  return scratch(n * kMiB, at::kByte);
}

// Sizes above those that other tests leave behind.
TEST(Scratch, ABufferServesTheNextOpThatNeedsAtMostAsMuch) {
  at::Tensor first = mebibytes(30);
  const void* place = first.data_ptr();
  const int64_t idle = idle_scratch_bytes();
  first.reset();
  EXPECT_EQ(idle_scratch_bytes(), idle + 30 * kMiB);
  const at::Tensor second = mebibytes(29);
  EXPECT_EQ(second.data_ptr(), place);
  EXPECT_EQ(second.numel(), 29 * kMiB);
  EXPECT_EQ(idle_scratch_bytes(), idle);
}

TEST(Scratch, ALargerOneTakesThePlaceOfOneThatIsTooSmall) {
  at::Tensor a = mebibytes(30), b = mebibytes(31);  // all that is idle is smaller from here on
  a.reset();
  const int64_t idle = idle_scratch_bytes();
  const at::Tensor c = mebibytes(32);
  EXPECT_EQ(idle_scratch_bytes(), idle - 30 * kMiB);
}

TEST(Scratch, TheSystemHasBackWhatIsLargerThanAnythingKept) {
  const int64_t idle = idle_scratch_bytes();
  { const at::Tensor huge = mebibytes(33); }
  EXPECT_EQ(idle_scratch_bytes(), idle);
}

TEST(Scratch, AViewHoldsTheBuffer) {
  at::Tensor whole = mebibytes(32);
  const at::Tensor view = whole.narrow(0, 5, 7);
  const int64_t idle = idle_scratch_bytes();
  whole.reset();
  EXPECT_EQ(idle_scratch_bytes(), idle);
}

// A weight that stays packed must not keep what the next op could use.
TEST(Scratch, APackedWeightHoldsNone) {
  const at::Tensor w = at::ones({1024, 1024}, at::kBFloat16), x = at::ones({1024, 1024}, at::kBFloat16);
  times_transposed(x, w);
  const int64_t idle = idle_scratch_bytes();
  EXPECT_GE(idle, 2 * kMiB);
  const PackedWeight packed(w);
  EXPECT_EQ(idle_scratch_bytes(), idle);
}

}  // namespace
}  // namespace titanium
