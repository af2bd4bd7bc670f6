// AdamW and the gradient norm on 135M elements in 32 units, beside at::_fused_adamw_ and torch's norms on the
// same memory. Alternating runs, medians.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_fused_adamw.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "bench/timing.h"
#include "titanium/optim/clip.h"
#include "titanium/optim/optimizer.h"

using namespace titanium;

namespace {

void report(const std::string& name, double ours, double peer, double bytes) {
  fmt::print("{} ours {:.1f} ms ({:.1f} GB/s) peer {:.1f} ms ({:.1f} GB/s)\n", name, ours * 1e3,
             bytes / ours / 1e9, peer * 1e3, bytes / peer / 1e9);
  fmt::print("{} ours {:.3f} peer {:.3f} ratio {:.3f} ms\n", name, ours * 1e3, peer * 1e3, peer / ours);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 9;
  constexpr int kUnits = 32;
  constexpr int64_t kRows = 4096, kCols = 1030;  // 32 x 4.2M = 135M
  WeightTable table;
  for (int i = 0; i < kUnits; ++i) table.add(fmt::format("w{}", i), {kRows, kCols}, Split::kRows, {}, i);
  ParamStore store(table, kUnits, {});
  store.init(1);
  store.zero_grad();
  AdamW optimizer(store, {});
  std::vector<at::Tensor> params, grads, means, squares, steps;
  for (const auto& unit : store.units()) {
    unit->grad_view(0, {unit->numel()}).normal_();
    params.push_back(unit->shard());
    grads.push_back(unit->grad_shard());
    means.push_back(optimizer.make_state(*unit, "exp_avg"));
    squares.push_back(optimizer.make_state(*unit, "exp_avg_sq"));
    steps.push_back(at::ones({}, at::kFloat));
  }
  const double n = static_cast<double>(store.parameters());
  fmt::print("{:.1f}M fp32 elements, {} threads, {} rounds\n", n / 1e6, at::get_num_threads(), rounds);

  std::vector<double> adamw, peer_adamw, norm, peer_norm;
  double ours_norm = 0, torch_norm = 0;
  for (int round = 0; round < rounds + 1; ++round) {  // the first warms up
    const double a = seconds([&] { optimizer.step({.lr = 1e-4, .clip = 0.5}); });
    const double b = seconds([&] {
      at::_fused_adamw_(params, grads, means, squares, {}, steps, 1e-4, 0.9, 0.95, 0.1, 1e-8, false, false);
    });
    const double c = seconds([&] { ours_norm = grad_norm(store).value; });
    const double d = seconds([&] {
      std::vector<at::Tensor> norms;
      for (const at::Tensor& g : grads) norms.push_back(at::linalg_vector_norm(g, 2));
      torch_norm = at::linalg_vector_norm(at::stack(norms), 2).item<double>();
    });
    if (round == 0) continue;
    adamw.push_back(a);
    peer_adamw.push_back(b);
    norm.push_back(c);
    peer_norm.push_back(d);
  }
  if (std::abs(ours_norm - torch_norm) > 1e-3 * torch_norm) {
    fmt::print("norms differ: {} and {}\n", ours_norm, torch_norm);
    return 1;
  }
  report("adamw_135m", median(adamw), median(peer_adamw), n * 28);
  report("adamw_and_norm_135m", median(adamw) + median(norm), median(peer_adamw) + median(peer_norm), n * 32);
  report("grad_norm_135m", median(norm), median(peer_norm), n * 4);
  return 0;
}
