#include "titanium/optim/clip.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>

#include "titanium/base/error.h"
#include "titanium/optim/kernels.h"

namespace titanium {
namespace {

constexpr int64_t kBlock = 1 << 14;  // elements summed by one thread at a time: part of the order of the sum
constexpr size_t kNamed = 5;

// The sums of squares of all blocks of all units, in order: one parallel region, not one a unit.
std::vector<double> block_sums(const ParamStore& store) {
  struct Block {
    const void* x;
    int64_t n;
    bool wide;
  };
  std::vector<Block> blocks;
  for (const auto& unit : store.units()) {
    const at::Tensor grad = unit->grad_shard();
    if (!grad.defined()) continue;
    if (grad.scalar_type() != at::kFloat && grad.scalar_type() != at::kDouble) {
      throw Bug("unit '{}': gradients in {}", unit->name(), c10::toString(grad.scalar_type()));
    }
    const auto* data = static_cast<const char*>(grad.const_data_ptr());
    for (int64_t at = 0; at < grad.numel(); at += kBlock) {
      blocks.push_back({data + at * static_cast<int64_t>(grad.element_size()),
                        std::min(kBlock, grad.numel() - at), grad.scalar_type() == at::kDouble});
    }
  }
  std::vector<double> sums(blocks.size());
  at::parallel_for(0, static_cast<int64_t>(blocks.size()), 2, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Block& b = blocks[i];
      sums[i] = b.wide ? sum_of_squares(static_cast<const double*>(b.x), b.n)
                       : sum_of_squares(static_cast<const float*>(b.x), b.n);
    }
  });
  return sums;
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
    bad.push_back({slice.weight->name(), slice.global_index(i), value});
  }
  return bad;
}

// Of all ranks, in the order of the table.
std::vector<BadGradient> first_bad_gradients(const ParamStore& store) {
  std::vector<BadGradient> bad = bad_gradients(store);
  if (store.mesh().copy().size() == 1) return bad;
  std::string mine;
  for (const BadGradient& b : bad) mine += fmt::format("{} {} {}\n", b.index, b.value, b.name);
  bad.clear();
  for (const std::string& lines : store.mesh().copy().exchange(mine)) {
    std::istringstream in(lines);
    for (BadGradient b; std::getline(in, b.name);) {
      char* rest = nullptr;
      b.index = std::strtoll(b.name.c_str(), &rest, 10);
      b.value = std::strtod(rest, &rest);
      b.name.erase(0, rest + 1 - b.name.c_str());
      bad.push_back(b);
    }
  }
  std::map<std::string, size_t> order;
  for (const auto& weight : store.table().weights()) order.emplace(weight->name(), order.size());
  std::sort(bad.begin(), bad.end(), [&](const BadGradient& a, const BadGradient& b) {
    return std::pair(order.at(a.name), a.index) < std::pair(order.at(b.name), b.index);
  });
  const auto same = [](const BadGradient& a, const BadGradient& b) { return a.name == b.name; };
  bad.erase(std::unique(bad.begin(), bad.end(), same), bad.end());
  if (bad.size() > kNamed) bad.resize(kNamed);
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
  for (double s : block_sums(store)) sum += s;
  GradNorm norm;
  norm.value = std::sqrt(store.mesh().copy().sum(sum));
  if (!norm.finite()) norm.bad = first_bad_gradients(store);
  return norm;
}

double clip_coefficient(double norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

}  // namespace titanium
