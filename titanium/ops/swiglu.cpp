#include "titanium/ops/swiglu.h"

#include <ATen/ATen.h>

#include "titanium/ops/gemm.h"
#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor swiglu_forward(const at::Tensor& gate_up) {
  const int64_t F = gate_up.size(1) / 2;
  const at::Tensor wide = gate_up.to(statistics_dtype(gate_up.scalar_type()));
  return (at::silu(wide.narrow(1, 0, F)) * wide.narrow(1, F, F)).to(gate_up.scalar_type());
}

at::Tensor swiglu_backward(const at::Tensor& g, const at::Tensor& gate_up) {
  const int64_t F = gate_up.size(1) / 2;
  const at::Tensor wide = gate_up.to(statistics_dtype(gate_up.scalar_type())), gw = g.to(wide.scalar_type());
  const at::Tensor gate = wide.narrow(1, 0, F), up = wide.narrow(1, F, F), s = at::sigmoid(gate);
  return at::cat({gw * up * s * (1 + gate * (1 - s)), gw * gate * s}, 1).to(gate_up.scalar_type());
}

struct SwigluFunction : torch::autograd::Function<SwigluFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up) {
    ctx->save_for_backward({gate_up});
    return swiglu_forward(gate_up);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {swiglu_backward(grads[0], ctx->get_saved_variables()[0])};
  }
};

struct SwigluLinearFunction : torch::autograd::Function<SwigluLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& gate_up, const MaybeTensor& residual,
                            const Handle* weight, const Handle* bias) {
    keep_handle(ctx, "weight", weight);
    keep_handle(ctx, "bias", bias);
    ctx->saved_data["residual"] = residual.has_value();
    ctx->save_for_backward({gate_up});
    return linear(swiglu_forward(gate_up), *weight, bias, or_none(residual));
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Handle* weight = kept_handle(ctx, "weight");
    const Handle* bias = kept_handle(ctx, "bias");
    const at::Tensor gate_up = ctx->get_saved_variables()[0];
    const at::Tensor g = grads[0].contiguous();
    const at::Tensor d_gate_up = swiglu_backward(at::mm(g, weight->value()), gate_up);
    if (trains(weight)) {
      const at::Tensor h = swiglu_forward(gate_up);
      weight->accumulate([g, h](const at::Tensor& sink) { add_outer(sink, g, h); });
    }
    if (trains(bias)) {
      const at::Tensor total = sum_rows(g);
      bias->accumulate([total](const at::Tensor& sink) { sink.add_(total); });
    }
    return {d_gate_up, ctx->saved_data["residual"].toBool() ? grads[0] : at::Tensor(), {}, {}};
  }
};

}  // namespace

at::Tensor swiglu(const at::Tensor& gate_up) {
  require(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "swiglu", "gate_up is [T, 2F]", gate_up, {});
  return records({gate_up}) ? SwigluFunction::apply(gate_up) : swiglu_forward(gate_up);
}

at::Tensor swiglu_linear(const at::Tensor& gate_up, const Handle& weight, const Handle* bias,
                         const at::Tensor& residual) {
  require(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "swiglu_linear", "gate_up is [T, 2F]", gate_up, {});
  if (!records({gate_up, residual})) return linear(swiglu_forward(gate_up), weight, bias, residual);
  return SwigluLinearFunction::apply(gate_up, maybe(residual), &weight, bias);
}

}  // namespace titanium
