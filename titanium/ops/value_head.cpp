#include "titanium/ops/value_head.h"

#include <ATen/ATen.h>

#include "titanium/ops/graph.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor values(const at::Tensor& x, const Handle& weight, const Handle& bias) {
  const at::ScalarType dtype = statistics_dtype(x.scalar_type());
  // Row by row, so that a token's value does not depend on its neighbours, as a matrix product's may.
  return (x.to(dtype) * weight.value().to(dtype)).sum(1) + bias.value().to(dtype);
}

struct ValueHead : torch::autograd::Function<ValueHead> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Handle* weight,
                            const Handle* bias) {
    keep_handle(ctx, "weight", weight);
    keep_handle(ctx, "bias", bias);
    ctx->save_for_backward({x});
    return values(x, *weight, *bias);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const at::Tensor x = ctx->get_saved_variables()[0];
    const Handle* weight = kept_handle(ctx, "weight");
    const Handle* bias = kept_handle(ctx, "bias");
    const at::Tensor g = grads[0].contiguous();  // [T]
    if (trains(weight)) {
      weight->accumulate(
          [x, g](const at::Tensor& sink) { sink[0].add_(at::mv(x.to(g.scalar_type()).t(), g)); });
    }
    if (trains(bias)) {
      bias->accumulate([g](const at::Tensor& sink) { sink.add_(g.sum()); });
    }
    const at::Tensor w = weight->value().to(g.scalar_type());  // [1, D]
    return {(g.unsqueeze(1) * w).to(x.scalar_type()), {}, {}};
  }
};

}  // namespace

at::Tensor value_head(const at::Tensor& x, const Handle& weight, const Handle& bias) {
  const at::Tensor w = weight.value(), b = bias.value();
  require(x.dim() == 2 && w.dim() == 2 && w.size(0) == 1 && w.size(1) == x.size(1) &&
              x.scalar_type() == w.scalar_type(),
          "value_head", "x is [T, D] and the weight [1, D], of one dtype", x, w);
  require(b.dim() == 1 && b.size(0) == 1, "value_head", "the bias is [1]", b, w);
  if (!records({x})) return values(x, weight, bias);
  return ValueHead::apply(x, &weight, &bias);
}

}  // namespace titanium
