#include "titanium/ops/linear.h"

#include <ATen/ATen.h>

#include "titanium/ops/graph.h"
#include "titanium/ops/products.h"
#include "titanium/ops/sums.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor linear_forward(const at::Tensor& x, const Handle& weight, const Handle* bias,
                          const at::Tensor& residual, const RowExchange* rows) {
  const at::Tensor w = weight.value();  // [O, I]
  require(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(),
          "linear", "x is [T, I] and the weight [O, I], of one dtype", x, w);
  at::Tensor b;
  if (bias != nullptr) {
    b = bias->value();  // [O]
    require(b.dim() == 1 && b.size(0) == w.size(0) && b.scalar_type() == w.scalar_type(), "linear",
            "the bias is [O], in the dtype of the weight", b, w);
  }
  const PackedWeight* packed = weight.packed();
  const at::Tensor sum = rows == nullptr ? at::Tensor() : rows->scatter(wide_times_transposed(x, w));
  if (residual.defined())
    require(residual.dim() == 2 && residual.size(0) == (rows == nullptr ? x : sum).size(0) &&
                residual.size(1) == w.size(0) && residual.scalar_type() == x.scalar_type(),
            "linear", "the residual is [T, O], in the dtype of x", residual, w);
  if (rows == nullptr && packed != nullptr) return times_transposed(x, *packed, b, residual);
  return rows == nullptr ? times_transposed(x, w, b, residual) : round_sum(sum, x.scalar_type(), b, residual);
}

struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const MaybeTensor& residual,
                            const Handle* weight, const Handle* bias, const RowExchange* rows) {
    keep_handle(ctx, "weight", weight);
    keep_handle(ctx, "bias", bias);
    keep_address(ctx, "rows", rows);
    ctx->saved_data["residual"] = residual.has_value();
    ctx->save_for_backward({trains(weight) ? x : at::Tensor()});
    return linear_forward(x, *weight, bias, or_none(residual), rows);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Handle* weight = kept_handle(ctx, "weight");
    const at::Tensor x = ctx->get_saved_variables()[0];
    const auto* rows = kept_address<RowExchange>(ctx, "rows");
    const at::Tensor mine = grads[0].contiguous();
    accumulate_bias(kept_handle(ctx, "bias"), mine);
    const at::Tensor g = rows == nullptr ? mine : rows->gather(mine);  // [T, O]
    at::Tensor dx, d_residual;
    if (ctx->needs_input_grad(0)) dx = times(g, weight->value());
    if (x.defined()) weight->accumulate([g, x](const at::Tensor& sink) { add_outer(sink, g, x); });
    if (ctx->saved_data["residual"].toBool()) d_residual = grads[0];
    return {dx, d_residual, {}, {}, {}};
  }
};

// Ids of rows that the weight has, and the tokens that they belong to: undefined for all of them.
struct LocalIds {
  at::Tensor ids, tokens;
};

LocalIds local_ids(const at::Tensor& ids, const at::Tensor& weight, const VocabSlice* slice) {
  if (slice == nullptr) return {ids, {}};
  const at::Tensor local = ids - slice->begin;
  const at::Tensor tokens = ((local >= 0) & (local < weight.size(0))).nonzero().flatten();
  return {local.index_select(0, tokens), tokens};
}

at::Tensor embedding_forward(const LocalIds& local, const at::Tensor& weight, int64_t T) {
  const at::Tensor rows = weight.index_select(0, local.ids);
  if (!local.tokens.defined()) return rows;
  return at::zeros({T, weight.size(1)}, weight.options()).index_copy_(0, local.tokens, rows);
}

struct EmbeddingFunction : torch::autograd::Function<EmbeddingFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& anchor, const LocalIds& local, int64_t T,
                            const Handle* weight) {
    (void)anchor;
    keep_handle(ctx, "weight", weight);
    const bool trained = trains(weight);
    ctx->save_for_backward({trained ? local.ids : at::Tensor(), trained ? local.tokens : at::Tensor()});
    return embedding_forward(local, weight->value(), T);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Handle* weight = kept_handle(ctx, "weight");
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &ids = saved[0], &tokens = saved[1];
    if (ids.defined()) {
      const at::Tensor g = tokens.defined() ? grads[0].index_select(0, tokens) : grads[0].contiguous();
      weight->accumulate([g, ids = ids](const at::Tensor& sink) { add_rows(sink, ids, g); });
    }
    return {at::Tensor(), {}, {}, {}};
  }
};

void check_ids(const at::Tensor& ids, int64_t vocabulary) {
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < ids.numel(); ++t)
    if (id[t] < 0 || id[t] >= vocabulary)
      throw BadData("token {} of the batch has id {}; the embedding holds ids 0 to {}", t, id[t],
                    vocabulary - 1);
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const Handle& weight, const Handle* bias, const at::Tensor& residual,
                  const RowExchange* rows) {
  if (!records({x, residual})) return linear_forward(x, weight, bias, residual, rows);
  return LinearFunction::apply(x, maybe(residual), &weight, bias, rows);
}

at::Tensor embedding(const at::Tensor& ids, const Handle& weight, const at::Tensor& anchor,
                     const VocabSlice* slice) {
  const at::Tensor flat = ids.contiguous();
  check_ids(flat, slice == nullptr ? weight.value().size(0) : slice->vocabulary);
  const LocalIds local = local_ids(flat, weight.value(), slice);
  if (!records({anchor})) return embedding_forward(local, weight.value(), flat.numel());
  return EmbeddingFunction::apply(anchor, local, flat.numel(), &weight);
}

}  // namespace titanium
