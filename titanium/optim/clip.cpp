#include "titanium/optim/clip.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/optim/kernels.h"

namespace titanium {
namespace {

constexpr int64_t kBlock = 1 << 14;  // elements summed by one thread at a time: part of the order of the sum
constexpr size_t kNamed = 5;

template <typename T>
double unit_sum(const T* x, int64_t n) {
  std::vector<double> sums((n + kBlock - 1) / kBlock);
  at::parallel_for(0, static_cast<int64_t>(sums.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; ++b) {
      sums[b] = sum_of_squares(x + b * kBlock, std::min(kBlock, n - b * kBlock));
    }
  });
  double sum = 0;
  for (double s : sums) sum += s;
  return sum;
}

template <typename T>
int64_t first_bad(const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) return i;
  }
  return -1;
}

std::vector<BadGradient> bad_gradients(const ParamStore& store) {
  std::vector<BadGradient> bad;
  for (const Slice& slice : store.slices()) {
    if (bad.size() == kNamed) break;
    if (!slice.unit->has_grad()) continue;
    const at::Tensor grad = slice.of(slice.unit->grad_shard());
    const bool wide = grad.scalar_type() == at::kDouble;
    const int64_t i = wide ? first_bad(grad.const_data_ptr<double>(), grad.numel())
                           : first_bad(grad.const_data_ptr<float>(), grad.numel());
    if (i < 0) continue;
    const double value = wide ? grad.const_data_ptr<double>()[i] : grad.const_data_ptr<float>()[i];
    bad.push_back({slice.weight->name(), slice.begin + i, value});
  }
  return bad;
}

}  // namespace

std::string GradNorm::describe() const {
  std::string text = fmt::format("gradient norm {}", value);
  for (const BadGradient& b : bad) {
    text += fmt::format("{}{}[{}] = {}", &b == bad.data() ? ": " : ", ", b.name, b.index, b.value);
  }
  return text;
}

GradNorm grad_norm(const ParamStore& store) {
  double sum = 0;
  for (const auto& unit : store.units()) {
    const at::Tensor grad = unit->grad_shard();
    if (!grad.defined()) continue;
    switch (grad.scalar_type()) {
      case at::kFloat:
        sum += unit_sum(grad.const_data_ptr<float>(), grad.numel());
        break;
      case at::kDouble:
        sum += unit_sum(grad.const_data_ptr<double>(), grad.numel());
        break;
      default:
        throw Bug("unit '{}': gradients in {}", unit->name(), c10::toString(grad.scalar_type()));
    }
  }
  GradNorm norm;
  norm.value = std::sqrt(store.replicas().sum(sum));
  if (!norm.finite()) norm.bad = bad_gradients(store);
  return norm;
}

double clip_coefficient(double norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

}  // namespace titanium
