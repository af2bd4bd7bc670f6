#include "titanium/ops/norm.h"

#include <ATen/ATen.h>

#include "titanium/ops/gemm.h"
#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x [T, D] -> 1 / sqrt(mean(x^2) + eps), [T].
at::Tensor inverse_rms(const at::Tensor& x, double eps) {
  const at::Tensor wide = x.to(statistics_dtype(x.scalar_type()));
  return (wide.square().mean(-1) + eps).rsqrt();
}

at::Tensor normalise(const at::Tensor& x, const at::Tensor& scale, const at::Tensor& weight) {
  const at::Tensor wide = x.to(scale.scalar_type());
  return (wide * scale.unsqueeze(-1) * weight.to(scale.scalar_type())).to(x.scalar_type());
}

// From g, the gradient of normalise(x): that of x and that of the norm weight.
std::pair<at::Tensor, at::Tensor> normalise_backward(const at::Tensor& g, const at::Tensor& x,
                                                     const at::Tensor& scale, const at::Tensor& weight) {
  const at::Tensor unit = x.to(scale.scalar_type()) * scale.unsqueeze(-1), wide = g.to(scale.scalar_type());
  const at::Tensor d_unit = wide * weight.to(scale.scalar_type());
  const at::Tensor dx = (d_unit - unit * (d_unit * unit).mean(-1, true)) * scale.unsqueeze(-1);
  return {dx.to(x.scalar_type()), (wide * unit).sum(0)};
}

struct RmsNormFunction : torch::autograd::Function<RmsNormFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Handle* weight, double eps) {
    const at::Tensor scale = inverse_rms(x, eps);
    keep_handle(ctx, "weight", weight);
    ctx->save_for_backward({x, scale});
    return normalise(x, scale, weight->value());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Handle* weight = kept_handle(ctx, "weight");
    const variable_list saved = ctx->get_saved_variables();
    const auto [dx, dw] = normalise_backward(grads[0], saved[0], saved[1], weight->value());
    if (trains(weight)) weight->accumulate([dw = dw](const at::Tensor& sink) { sink.add_(dw); });
    return {dx, {}, {}};
  }
};

struct NormLinearFunction : torch::autograd::Function<NormLinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Handle* norm, double eps,
                            const Handle* weight, const Handle* bias) {
    const at::Tensor scale = inverse_rms(x, eps);
    keep_handle(ctx, "norm", norm);
    keep_handle(ctx, "weight", weight);
    keep_handle(ctx, "bias", bias);
    ctx->save_for_backward({x, scale});
    return linear(normalise(x, scale, norm->value()), *weight, bias);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Handle* norm = kept_handle(ctx, "norm");
    const Handle* weight = kept_handle(ctx, "weight");
    const Handle* bias = kept_handle(ctx, "bias");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor g = grads[0].contiguous();
    const at::Tensor dn = at::mm(g, weight->value());
    const auto [dx, dw] = normalise_backward(dn, saved[0], saved[1], norm->value());
    if (trains(norm)) norm->accumulate([dw = dw](const at::Tensor& sink) { sink.add_(dw); });
    if (trains(weight)) {
      const at::Tensor n = normalise(saved[0], saved[1], norm->value());
      weight->accumulate([g, n](const at::Tensor& sink) { add_outer(sink, g, n); });
    }
    if (trains(bias)) {
      const at::Tensor total = sum_rows(g);
      bias->accumulate([total](const at::Tensor& sink) { sink.add_(total); });
    }
    return {dx, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const Handle& weight, double eps) {
  const at::Tensor flat = x.reshape({-1, x.size(-1)});
  if (!records({x})) return normalise(flat, inverse_rms(flat, eps), weight.value()).view(x.sizes());
  return RmsNormFunction::apply(flat, &weight, eps).view(x.sizes());
}

at::Tensor norm_linear(const at::Tensor& x, const Handle& norm, double eps, const Handle& weight,
                       const Handle* bias) {
  if (!records({x})) return linear(normalise(x, inverse_rms(x, eps), norm.value()), weight, bias);
  return NormLinearFunction::apply(x, &norm, eps, &weight, bias);
}

}  // namespace titanium
