// The products of a linear layer and the fused head, against compositions of ATen.  Alternates the two in one
// run and prints medians.  Usage: bench_ops [threads] [pairs] [gemm | head]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <malloc.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>

#include "titanium/ops/linear.h"
#include "titanium/ops/linear_logprob.h"
#include "titanium/ops/norm.h"
#include "titanium/ops/products.h"
#include "titanium/ops/swiglu.h"
#include "titanium/ops/test_handle.h"

namespace titanium {
namespace {

using Run = std::function<void()>;

double milliseconds(const Run& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

// One line: the medians of both, and what each does a second where `flops` is given.
void compare(const std::string& name, int pairs, double flops, const Run& ours, const Run& peer) {
  std::vector<double> a, b;
  ours();
  peer();
  for (int i = 0; i < pairs; ++i) {
    a.push_back(milliseconds(ours));
    b.push_back(milliseconds(peer));
  }
  const double x = median(a), y = median(b);
  fmt::print("{:44} ours {:8.2f} ms  ATen {:8.2f} ms  ratio {:5.2f}", name, x, y, y / x);
  if (flops > 0) fmt::print("   {:5.0f} / {:5.0f} GFLOP/s", flops / x / 1e6, flops / y / 1e6);
  fmt::print("\n");
  std::fflush(stdout);
}

void gemms(at::ScalarType dtype, int64_t T, int64_t I, int64_t O, int pairs) {
  const at::Tensor x = at::randn({T, I}).to(dtype), w = at::randn({O, I}).to(dtype),
                   g = at::randn({T, O}).to(dtype);
  const at::Tensor sink = at::zeros({O, I});
  const double flops = 2.0 * T * I * O;
  const std::string name = fmt::format("{} {}x{}x{} ", at::toString(dtype), T, I, O);
  compare(
      name + "forward", pairs, flops, [&] { times_transposed(x, w); }, [&] { at::mm(x, w.t()); });
  compare(
      name + "dX", pairs, flops, [&] { times(g, w); }, [&] { at::mm(g, w); });
  compare(
      name + "dW", pairs, flops, [&] { add_outer(sink, g, x); }, [&] { sink.add_(at::mm(g.t(), x)); });
}

void rows(at::ScalarType dtype, int64_t T, int64_t D, int64_t F, int pairs) {
  const at::Tensor x = at::randn({T, D}).to(dtype).requires_grad_(), g = at::randn({T, D}).to(dtype);
  const at::Tensor w = at::randn({D}).to(dtype).requires_grad_();
  const at::Tensor u = at::randn({T, 2 * F}).to(dtype).requires_grad_(), gu = at::randn({T, F}).to(dtype);
  const TestHandle weight(w.detach());
  const std::string name = fmt::format("{} ", at::toString(dtype));
  const auto plain_norm = [&] {
    const at::Tensor wide = x.to(at::kFloat);
    return (wide * (wide.square().mean(-1, true) + 1e-5).rsqrt()).to(dtype) * w;
  };
  const auto plain_swiglu = [&] { return at::silu(u.narrow(1, 0, F)) * u.narrow(1, F, F); };
  compare(
      name + "rms_norm forward + backward", pairs, 0,
      [&] { torch::autograd::grad({rms_norm(x, weight, 1e-5)}, {x}, {g}); },
      [&] {
        torch::autograd::grad({plain_norm()}, {x, w}, {g});
      });
  compare(
      name + "swiglu forward + backward", pairs, 0, [&] { torch::autograd::grad({swiglu(u)}, {u}, {gu}); },
      [&] { torch::autograd::grad({plain_swiglu()}, {u}, {gu}); });
}

void head(at::ScalarType dtype, int64_t T, int64_t D, int64_t V, int pairs) {
  const at::Tensor x = at::randn({T, D}).to(dtype).requires_grad_();
  const at::Tensor w = (at::randn({V, D}) / 10).to(dtype).requires_grad_();
  const at::Tensor labels = at::randint(V, {T}, at::kLong), weights = at::full({T}, 1.0 / T);
  const TestHandle weight(w.detach());
  const auto plain = [&] {  // as transformers: logits in the compute dtype, the softmax in fp32
    const at::Tensor logp = at::log_softmax(at::mm(x, w.t()).to(at::kFloat), 1);
    return logp.gather(1, labels.unsqueeze(1)).squeeze(1);
  };
  const double flops = 2.0 * T * D * V;
  const std::string name = fmt::format("{} head {}x{}x{} ", at::toString(dtype), T, D, V);
  const auto no_grad = [](const Run& f) {
    return [f] {
      const at::AutoGradMode off(false);
      f();
    };
  };
  compare(name + "logprob", pairs, flops, no_grad([&] { linear_logprob(x, weight, labels); }),
          no_grad([&] { plain(); }));
  compare(
      name + "forward, backward", pairs, 3 * flops,
      [&] { torch::autograd::grad({-(linear_logprob(x, weight, labels).logprob * weights).sum()}, {x}); },
      [&] {
        weight.sink.add_(torch::autograd::grad({-(plain() * weights).sum()}, {x, w})[1]);
      });
  compare(
      name + "weighted_nll", pairs, 3 * flops,
      [&] { torch::autograd::grad({weighted_nll(x, weight, labels, weights).loss}, {x}); },
      [&] {
        weight.sink.add_(torch::autograd::grad({-(plain() * weights).sum()}, {x, w})[1]);
      });
}

}  // namespace
}  // namespace titanium

int main(int argc, char** argv) {
  using namespace titanium;
  if (argc > 1) at::set_num_threads(std::atoi(argv[1]));
  const int pairs = argc > 2 ? std::atoi(argv[2]) : 7;
  const std::string only = argc > 3 ? argv[3] : "";
  mallopt(M_MMAP_THRESHOLD, 1 << 30);  // reuse pages, on both sides, as a training program does
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
    if (only != "head") {
      gemms(dtype, 2048, 576, 1536, pairs);
      gemms(dtype, 2048, 1536, 576, pairs);
      gemms(dtype, 2048, 576, 960, pairs);
      gemms(dtype, 512, 576, 49152, pairs);
      rows(dtype, 2048, 576, 1536, pairs);
    }
    if (only != "gemm") head(dtype, 2048, 576, 49152, pairs);
  }
  return 0;
}
