#include "titanium/ops/swiglu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"
#include "titanium/ops/products.h"
#include "titanium/ops/sums.h"
#include "titanium/ops/vector.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// 1 / (1 + exp(-x)).
template <typename A>
TITANIUM_INLINE Vector<A> sigmoid(Vector<A> x) {
  constexpr A kLog2e = static_cast<A>(1.44269504088896340736), kMost = sizeof(A) == 4 ? 126 : 1022;
  const Vector<A> power = x * -kLog2e;
  return static_cast<A>(1) / (static_cast<A>(1) + exp2(power > kMost ? splat(kMost) : power));
}

// Up to kLanes numbers as a vector, zeros beyond, and back.
template <typename S>
TITANIUM_INLINE Vector<Wide<S>> load_some(const S* from, int64_t n) {
  if (n >= kLanes<Wide<S>>) return load_wide(from);
  S all[kLanes<Wide<S>>] = {};
  for (int64_t i = 0; i < n; ++i) all[i] = from[i];
  return load_wide(all);
}
template <typename S>
TITANIUM_INLINE void store_some(S* to, Vector<Wide<S>> v, int64_t n) {
  if (n >= kLanes<Wide<S>>) return store_narrow(to, v);
  S all[kLanes<Wide<S>>];
  store_narrow(all, v);
  for (int64_t i = 0; i < n; ++i) to[i] = all[i];
}

template <typename S>
TITANIUM_INLINE void forward_rows(int64_t rows, int64_t F, const S* gate_up, S* out) {
  using A = Wide<S>;
  for (int64_t t = 0; t < rows; ++t, gate_up += 2 * F, out += F)
    for (int64_t i = 0; i < F; i += kLanes<A>) {
      const Vector<A> gate = load_some(gate_up + i, F - i), up = load_some(gate_up + F + i, F - i);
      store_some(out + i, gate * sigmoid<A>(gate) * up, F - i);
    }
}

// With s = sigmoid(gate): d gate = g up s (1 + gate (1 - s)), d up = g gate s; `hidden`, if given, gets gate
// s up again.
template <typename S>
TITANIUM_INLINE void backward_rows(int64_t rows, int64_t F, const S* g, const S* gate_up, S* d_gate_up,
                                   S* hidden) {
  using A = Wide<S>;
  for (int64_t t = 0; t < rows; ++t, gate_up += 2 * F, d_gate_up += 2 * F, g += F) {
    for (int64_t i = 0; i < F; i += kLanes<A>) {
      const Vector<A> gate = load_some(gate_up + i, F - i), up = load_some(gate_up + F + i, F - i);
      const Vector<A> gi = load_some(g + i, F - i), s = sigmoid<A>(gate), silu = gate * s;
      store_some(d_gate_up + i, gi * up * s * (static_cast<A>(1) + gate * (static_cast<A>(1) - s)), F - i);
      store_some(d_gate_up + F + i, gi * silu, F - i);
      if (hidden != nullptr) store_some(hidden + t * F + i, silu * up, F - i);
    }
  }
}

#define TITANIUM_SWIGLU(S)                                                                               \
  TITANIUM_CLONES void run_forward(int64_t rows, int64_t F, const S* gate_up, S* out) {                  \
    forward_rows(rows, F, gate_up, out);                                                                 \
  }                                                                                                      \
  TITANIUM_CLONES void run_backward(int64_t rows, int64_t F, const S* g, const S* gate_up, S* d_gate_up, \
                                    S* hidden) {                                                         \
    backward_rows(rows, F, g, gate_up, d_gate_up, hidden);                                               \
  }
TITANIUM_SWIGLU(at::BFloat16)
TITANIUM_SWIGLU(float)
TITANIUM_SWIGLU(double)
#undef TITANIUM_SWIGLU

constexpr int64_t kGrain = 16;  // rows a thread takes at least

at::Tensor swiglu_forward(const at::Tensor& gate_up) {  // contiguous
  const int64_t T = gate_up.size(0), F = gate_up.size(1) / 2;
  const at::Tensor out = at::empty({T, F}, gate_up.options());
  for_dtype(gate_up.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    const S* from = gate_up.const_data_ptr<S>();
    S* to = out.mutable_data_ptr<S>();
    at::parallel_for(0, T, kGrain, [&](int64_t begin, int64_t end) {
      run_forward(end - begin, F, from + begin * 2 * F, to + begin * F);
    });
  });
  return out;
}

// The gradient of gate_up; `hidden` [T, F], where defined, gets swiglu(gate_up) again.
at::Tensor swiglu_backward(const at::Tensor& gradient, const at::Tensor& gate_up, const at::Tensor& hidden) {
  const int64_t T = gate_up.size(0), F = gate_up.size(1) / 2;
  const at::Tensor g = gradient.contiguous(), out = at::empty_like(gate_up);
  for_dtype(gate_up.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    const S *from = g.const_data_ptr<S>(), *at = gate_up.const_data_ptr<S>();
    S *to = out.mutable_data_ptr<S>(), *again = hidden.defined() ? hidden.mutable_data_ptr<S>() : nullptr;
    at::parallel_for(0, T, kGrain, [&](int64_t begin, int64_t end) {
      run_backward(end - begin, F, from + begin * F, at + begin * 2 * F, to + begin * 2 * F,
                   again == nullptr ? nullptr : again + begin * F);
    });
  });
  return out;
}

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up) {
    ctx->save_for_backward({gate_up});
    return swiglu_forward(gate_up);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {swiglu_backward(grads[0], ctx->get_saved_variables()[0], {})};
  }
};

struct SwigluLinearFunction : torch::autograd::Function<SwigluLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up, const MaybeTensor& residual,
                            const Handle* weight, const Handle* bias, const RowExchange* rows) {
    keep_handle(ctx, "weight", weight);
    keep_handle(ctx, "bias", bias);
    keep_address(ctx, "rows", rows);
    ctx->saved_data["residual"] = residual.has_value();
    ctx->save_for_backward({gate_up});
    return linear(swiglu_forward(gate_up), *weight, bias, or_none(residual), rows);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Handle* weight = kept_handle(ctx, "weight");
    const auto* rows = kept_address<RowExchange>(ctx, "rows");
    const at::Tensor gate_up = ctx->get_saved_variables()[0];
    const at::Tensor mine = grads[0].contiguous();
    accumulate_bias(kept_handle(ctx, "bias"), mine);
    const at::Tensor g = rows == nullptr ? mine : rows->gather(mine);  // [T, O]
    at::Tensor hidden;
    if (trains(weight)) hidden = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    const at::Tensor d_gate_up = swiglu_backward(times(g, weight->value()), gate_up, hidden);
    if (hidden.defined())
      weight->accumulate([g, hidden](const at::Tensor& sink) { add_outer(sink, g, hidden); });
    return {d_gate_up, ctx->saved_data["residual"].toBool() ? grads[0] : at::Tensor(), {}, {}, {}};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up) {
  require(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "swiglu", "gate_up is [T, 2F]", gate_up, {});
  const at::Tensor rows = gate_up.contiguous();
  return records({rows}) ? SwigluFunction::apply(rows) : swiglu_forward(rows);
}

at::Tensor swiglu_linear(const at::Tensor& gate_up, const Handle& weight, const Handle* bias,
                         const at::Tensor& residual, const RowExchange* rows) {
  require(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "swiglu_linear", "gate_up is [T, 2F]", gate_up, {});
  const at::Tensor input = gate_up.contiguous();
  if (!records({input, residual})) return linear(swiglu_forward(input), weight, bias, residual, rows);
  return SwigluLinearFunction::apply(input, maybe(residual), &weight, bias, rows);
}

}  // namespace titanium
