// Packed causal attention of this project against libtorch's flash attention for CPUs, forward and backward.
// Alternates the two in one run and prints medians.  Usage: bench_attention [threads] [pairs]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>

#include "titanium/ops/attention.h"

namespace titanium {
namespace {

struct Case {
  int64_t documents, length, N, K, H;
  at::ScalarType dtype;
};

double milliseconds(const std::function<void()>& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

void run(const Case& c, int pairs) {
  const int64_t T = c.documents * c.length;
  const at::TensorOptions options = at::TensorOptions().dtype(c.dtype);
  at::Tensor q = at::randn({T, c.N, c.H}, options).requires_grad_(),
             k = at::randn({T, c.K, c.H}, options).requires_grad_(),
             v = at::randn({T, c.K, c.H}, options).requires_grad_();
  const at::Tensor grad = at::randn({T, c.N, c.H}, options);
  AttentionSpec spec;
  for (int64_t d = 0; d <= c.documents; ++d) spec.q_bounds.push_back(d * c.length);
  spec.k_bounds = spec.q_bounds;

  // libtorch wants [documents, heads, length, H] and as many key heads as query heads.
  const auto batched = [&](const at::Tensor& x) {
    return x.view({c.documents, c.length, x.size(1), c.H}).transpose(1, 2);
  };
  const auto expanded = [&](const at::Tensor& x) {
    return batched(x)
        .unsqueeze(2)
        .expand({c.documents, c.K, c.N / c.K, c.length, c.H})
        .reshape({c.documents, c.N, c.length, c.H});
  };
  const auto theirs = [&] {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(batched(q), expanded(k), expanded(v),
                                                                       0.0, true))
        .transpose(1, 2)
        .reshape({T, c.N, c.H});
  };
  const auto ours = [&] { return attention(q, k, v, spec); };

  std::vector<double> time[4];
  for (int i = 0; i <= pairs; ++i)
    for (int side = 0; side < 2; ++side) {
      at::Tensor out;
      const double forward = milliseconds([&] { out = side == 0 ? ours() : theirs(); });
      const double backward = milliseconds([&] { torch::autograd::grad({out}, {q, k, v}, {grad}); });
      if (i == 0) continue;  // first touch of memory, and code made at run time
      time[side * 2].push_back(forward);
      time[side * 2 + 1].push_back(backward);
    }
  const double of = median(time[0]), ob = median(time[1]), tf = median(time[2]), tb = median(time[3]);
  // Products of the forward, and of the backward with the scores formed again, over the visible half.
  const double gflop = 2e-9 * 2 * static_cast<double>(T) * (c.length + 1) / 2 * c.N * c.H;
  fmt::print(
      "{:8} {}x{} N {} K {} H {}: forward {:.2f} ms, libtorch {:.2f} (x{:.2f}); backward {:.2f} ms, libtorch "
      "{:.2f} "
      "(x{:.2f}); both x{:.2f}; GFLOP/s {:.0f} / {:.0f}\n",
      at::toString(c.dtype), c.documents, c.length, c.N, c.K, c.H, of, tf, tf / of, ob, tb, tb / ob,
      (tf + tb) / (of + ob), gflop / of * 1e3, gflop * 2.5 / ob * 1e3);
}

}  // namespace
}  // namespace titanium

int main(int argc, char** argv) {
  at::set_num_threads(argc > 1 ? std::atoi(argv[1]) : 2);
  const int pairs = argc > 2 ? std::atoi(argv[2]) : 15;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat})
    for (const auto& [documents, length, N, K, H] :
         {std::array<int64_t, 5>{4, 512, 9, 3, 64}, {1, 2048, 9, 3, 64}, {4, 512, 16, 8, 128}})
      titanium::run({documents, length, N, K, H, dtype}, pairs);
}
