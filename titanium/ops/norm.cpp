#include "titanium/ops/norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"
#include "titanium/ops/products.h"
#include "titanium/ops/sums.h"
#include "titanium/ops/vector.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kChunk = 32;  // rows whose share of the weight gradient is summed first

// sum over i of term(i), of which `vector` gives kLanes at once: lane by lane, then the lanes, then the rest.
template <typename A, typename VectorTerm, typename Term>
TITANIUM_INLINE A sum_over(int64_t width, VectorTerm vector, Term term) {
  Vector<A> lanes = {};
  int64_t i = 0;
  for (; i + kLanes<A> <= width; i += kLanes<A>) lanes += vector(i);
  A total = 0;
  for (int lane = 0; lane < kLanes<A>; ++lane) total += lanes[lane];
  for (; i < width; ++i) total += term(i);
  return total;
}

template <typename S>
TITANIUM_INLINE void scales(int64_t rows, int64_t D, const S* x, double eps, Wide<S>* scale) {
  using A = Wide<S>;
  for (int64_t t = 0; t < rows; ++t, x += D) {
    const A squares = sum_over<A>(
        D, [&](int64_t i) __attribute__((always_inline)) { return load_wide(x + i) * load_wide(x + i); },
        [&](int64_t i)
            __attribute__((always_inline)) { return static_cast<A>(x[i]) * static_cast<A>(x[i]); });
    scale[t] = 1 / std::sqrt(squares / static_cast<A>(D) + static_cast<A>(eps));
  }
}

template <typename S>
TITANIUM_INLINE void normalise_rows(int64_t rows, int64_t D, const S* x, const Wide<S>* scale, const S* w,
                                    S* out) {
  using A = Wide<S>;
  for (int64_t t = 0; t < rows; ++t, x += D, out += D) {
    int64_t i = 0;
    for (; i + kLanes<A> <= D; i += kLanes<A>)
      store_narrow(out + i, load_wide(x + i) * scale[t] * load_wide(w + i));
    for (; i < D; ++i) out[i] = static_cast<S>(static_cast<A>(x[i]) * scale[t] * static_cast<A>(w[i]));
  }
}

// With u = scale x: dx = scale (w g - u mean(w g u)), dw += g u.
template <typename S>
TITANIUM_INLINE void backward_rows(int64_t rows, int64_t D, const S* g, const S* x, const Wide<S>* scale,
                                   const S* w, S* dx, Wide<S>* dw) {
  using A = Wide<S>;
  for (int64_t t = 0; t < rows; ++t, g += D, x += D, dx += D) {
    const A s = scale[t];
    const A dot = sum_over<A>(
        D,
        [&](int64_t i)
            __attribute__((always_inline)) { return load_wide(g + i) * load_wide(w + i) * load_wide(x + i); },
        [&](int64_t i) __attribute__((always_inline)) {
          return static_cast<A>(g[i]) * static_cast<A>(w[i]) * static_cast<A>(x[i]);
        });
    const A pull = dot * s * s / static_cast<A>(D);
    int64_t i = 0;
    for (; i + kLanes<A> <= D; i += kLanes<A>) {
      const Vector<A> gi = load_wide(g + i), xi = load_wide(x + i);
      store(dw + i, load(dw + i) + gi * xi * s);
      store_narrow(dx + i, (gi * load_wide(w + i) - xi * pull) * s);
    }
    for (; i < D; ++i) {
      const A gi = static_cast<A>(g[i]), xi = static_cast<A>(x[i]);
      dw[i] += gi * xi * s;
      dx[i] = static_cast<S>((gi * static_cast<A>(w[i]) - xi * pull) * s);
    }
  }
}

#define TITANIUM_NORM(S)                                                                                    \
  TITANIUM_CLONES void run_scales(int64_t rows, int64_t D, const S* x, double eps, Wide<S>* scale) {        \
    scales(rows, D, x, eps, scale);                                                                         \
  }                                                                                                         \
  TITANIUM_CLONES void run_normalise(int64_t rows, int64_t D, const S* x, const Wide<S>* scale, const S* w, \
                                     S* out) {                                                              \
    normalise_rows(rows, D, x, scale, w, out);                                                              \
  }                                                                                                         \
  TITANIUM_CLONES void run_backward(int64_t rows, int64_t D, const S* g, const S* x, const Wide<S>* scale,  \
                                    const S* w, S* dx, Wide<S>* dw) {                                       \
    backward_rows(rows, D, g, x, scale, w, dx, dw);                                                         \
  }
TITANIUM_NORM(at::BFloat16)
TITANIUM_NORM(float)
TITANIUM_NORM(double)
#undef TITANIUM_NORM

// run(first row, rows) over chunks of rows, on all threads.
template <typename Run>
void for_chunks(int64_t T, const Run& run) {
  at::parallel_for(0, (T + kChunk - 1) / kChunk, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) run(c * kChunk, std::min(kChunk, T - c * kChunk));
  });
}

void check(const at::Tensor& x, const at::Tensor& weight) {
  require(x.dim() == 2 && weight.dim() == 1 && weight.size(0) == x.size(1) &&
              x.scalar_type() == weight.scalar_type(),
          "rms_norm", "x is [..., D] and the weight [D], of one dtype", x, weight);
}

// x [T, D], contiguous -> 1 / sqrt(mean(x^2) + eps), [T].
at::Tensor inverse_rms(const at::Tensor& x, double eps) {
  const int64_t T = x.size(0), D = x.size(1);
  const at::Tensor scale = at::empty({T}, x.options().dtype(statistics_dtype(x.scalar_type())));
  for_dtype(x.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    const S* from = x.const_data_ptr<S>();
    Wide<S>* to = scale.mutable_data_ptr<Wide<S>>();
    for_chunks(T, [&](int64_t t, int64_t n) { run_scales(n, D, from + t * D, eps, to + t); });
  });
  return scale;
}

at::Tensor normalise(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& weight) {
  check(x, weight);
  const int64_t T = x.size(0), D = x.size(1);
  const at::Tensor out = at::empty_like(x), by_one = weight.contiguous();
  for_dtype(x.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    const S *from = x.const_data_ptr<S>(), *w = by_one.const_data_ptr<S>();
    const Wide<S>* s = scale.const_data_ptr<Wide<S>>();
    S* to = out.mutable_data_ptr<S>();
    for_chunks(T, [&](int64_t t, int64_t n) { run_normalise(n, D, from + t * D, s + t, w, to + t * D); });
  });
  return out;
}

// From g, the gradient of normalise(x): that of x and, through the handle, that of the norm weight.
at::Tensor normalise_backward(const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& scale,
                              const Handle& weight) {
  const at::Tensor g = gradient.contiguous(), by_one = weight.value().contiguous();
  check(x, by_one);
  const int64_t T = x.size(0), D = x.size(1);
  const at::Tensor dx = at::empty_like(x), dw = at::zeros({(T + kChunk - 1) / kChunk, D}, scale.options());
  for_dtype(x.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    using A = Wide<S>;
    const S *from = g.const_data_ptr<S>(), *at = x.const_data_ptr<S>(), *w = by_one.const_data_ptr<S>();
    const A* s = scale.const_data_ptr<A>();
    S* to = dx.mutable_data_ptr<S>();
    A* share = dw.mutable_data_ptr<A>();
    for_chunks(T, [&](int64_t t, int64_t n) {
      run_backward(n, D, from + t * D, at + t * D, s + t, w, to + t * D, share + t / kChunk * D);
    });
  });
  if (weight.trainable()) {
    const at::Tensor total = sum_rows(dw);
    weight.accumulate([total](const at::Tensor& sink) { sink.add_(total); });
  }
  return dx;
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Handle* weight, double eps) {
    const at::Tensor scale = inverse_rms(x, eps);
    keep_handle(ctx, "weight", weight);
    ctx->save_for_backward({x, scale});
    return normalise(x, scale, weight->value());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    return {normalise_backward(grads[0], saved[0], saved[1], *kept_handle(ctx, "weight")), {}, {}};
  }
};

// The normalised rows, of every rank where they are cut over several.
at::Tensor normalise_all(const at::Tensor& x, const at::Tensor& scale, const Handle& norm,
                         const RowExchange* rows) {
  const at::Tensor n = normalise(x, scale, norm.value());
  return rows == nullptr ? n : rows->gather(n);
}

struct NormLinearFunction : torch::autograd::Function<NormLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Handle* norm, double eps,
                            const Handle* weight, const Handle* bias, const RowExchange* rows, bool keep) {
    const at::Tensor scale = inverse_rms(x, eps), n = normalise_all(x, scale, *norm, rows);
    keep_address(ctx, "rows", rows);
    keep_handle(ctx, "norm", norm);
    keep_handle(ctx, "weight", weight);
    keep_handle(ctx, "bias", bias);
    ctx->save_for_backward({x, scale, keep && trains(weight) ? n : at::Tensor()});
    return linear(n, *weight, bias);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Handle* norm = kept_handle(ctx, "norm");
    const Handle* weight = kept_handle(ctx, "weight");
    const auto* rows = kept_address<RowExchange>(ctx, "rows");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor g = grads[0].contiguous();  // [T, O]
    const at::Tensor dn =
        rows == nullptr ? times(g, weight->value())
                        : round_sum(rows->scatter(wide_times(g, weight->value())), saved[0].scalar_type());
    const at::Tensor dx = normalise_backward(dn, saved[0], saved[1], *norm);
    if (trains(weight)) {
      const at::Tensor n = saved[2].defined() ? saved[2] : normalise_all(saved[0], saved[1], *norm, rows);
      weight->accumulate([g, n](const at::Tensor& sink) { add_outer(sink, g, n); });
    }
    accumulate_bias(kept_handle(ctx, "bias"), g);
    return {dx, {}, {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const Handle& weight, double eps) {
  const at::Tensor flat = x.reshape({-1, x.size(-1)}).contiguous();
  if (!records({x})) return normalise(flat, inverse_rms(flat, eps), weight.value()).view(x.sizes());
  return RmsNormFunction::apply(flat, &weight, eps).view(x.sizes());
}

at::Tensor norm_linear(const at::Tensor& x, const Handle& norm, double eps, const Handle& weight,
                       const Handle* bias, const RowExchange* rows, bool keep) {
  require(x.dim() == 2, "norm_linear", "x is [T, D]", x, {});
  const at::Tensor flat = x.contiguous();
  if (!records({x})) return linear(normalise_all(flat, inverse_rms(flat, eps), norm, rows), weight, bias);
  return NormLinearFunction::apply(flat, &norm, eps, &weight, bias, rows, keep);
}

}  // namespace titanium
