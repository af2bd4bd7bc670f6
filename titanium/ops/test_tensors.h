// Helpers of the tests of this room: comparison, naive head, and runs at another number of threads.
#pragma once
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace titanium {

// The largest difference of any two entries; infinite for NaN or unequal shapes.
inline double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return INFINITY;
  if (a.numel() == 0) return 0;
  const double d = (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
  return d == d ? d : INFINITY;
}

// The same, over the largest entry of `want`.
inline double relative(const at::Tensor& got, const at::Tensor& want) {
  return distance(got, want) / std::max(1e-30, want.to(at::kDouble).abs().max().item<double>());
}

inline at::Tensor leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kDouble) {
  return at::randn(sizes, at::kDouble).to(dtype).requires_grad_();
}

// What `run` gives with one and with two threads must agree to the bit.
inline void expect_same_bits_for_threads(const std::function<std::vector<at::Tensor>()>& run) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const std::vector<at::Tensor> one = run();
  at::set_num_threads(2);
  const std::vector<at::Tensor> two = run();
  at::set_num_threads(before);
  ASSERT_EQ(one.size(), two.size());
  for (size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << "tensor " << i;
}

}  // namespace titanium
