#include "titanium/shard/tp.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"
#include "titanium/ops/norm.h"
#include "titanium/ops/sums.h"
#include "titanium/ops/swiglu.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

at::Tensor gather_flat(const Group& group, const at::Tensor& mine) {
  std::vector<int64_t> shape = mine.sizes().vec();
  const int64_t rows = shape.at(0);
  shape[0] *= group.size();
  const at::Tensor all = at::empty(shape, mine.options().requires_grad(false));
  all.narrow(0, group.rank() * rows, rows).copy_(mine);
  group.all_gather(all);
  return all;
}

at::Tensor scatter_flat(const Group& group, const at::Tensor& partial) {
  if (partial.size(0) % group.size() != 0) {
    throw Bug("{} tokens over {} tensor-parallel ranks: the batch was not padded to a multiple of them",
              partial.size(0), group.size());
  }
  const int64_t rows = partial.size(0) / group.size();
  group.reduce_scatter(partial);
  return partial.narrow(0, group.rank() * rows, rows);
}

struct GatherRows : Function<GatherRows> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const RowExchange* rows) {
    keep_address(ctx, "rows", rows);
    return rows->gather(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const at::Tensor own = grads[0].clone(at::MemoryFormat::Contiguous);  // others may read the gradient too
    return {kept_address<RowExchange>(ctx, "rows")->scatter(own), {}};
  }
};

struct GatherValues : Function<GatherValues> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const RowExchange* rows,
                            int64_t rank) {
    ctx->saved_data["begin"] = rank * x.size(0);
    ctx->saved_data["count"] = x.size(0);
    return rows->gather(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {
        grads[0].narrow(0, ctx->saved_data["begin"].toInt(), ctx->saved_data["count"].toInt()).contiguous(),
        {},
        {}};
  }
};

// residual + bias + this rank's rows of the sum of `partial`, which it overwrites.
struct ScatterRows : Function<ScatterRows> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& partial, const MaybeTensor& residual,
                            const Handle* bias, const RowExchange* rows) {
    keep_address(ctx, "rows", rows);
    keep_handle(ctx, "bias", bias);
    ctx->saved_data["residual"] = residual.has_value();
    return run(partial, or_none(residual), bias, *rows);
  }
  static at::Tensor run(const at::Tensor& partial, const at::Tensor& residual, const Handle* bias,
                        const RowExchange& rows) {
    const at::Tensor mine = rows.scatter(partial.detach());
    const at::Tensor out = residual.defined() ? at::add(residual, mine) : mine.clone();
    return bias == nullptr ? out : out.add_(bias->value());
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const at::Tensor g = grads[0].contiguous();  // [t, D]
    accumulate_bias(kept_handle(ctx, "bias"), g);
    const at::Tensor all = kept_address<RowExchange>(ctx, "rows")->gather(g);
    return {all, ctx->saved_data["residual"].toBool() ? grads[0] : at::Tensor(), {}, {}};
  }
};

at::Tensor scatter(const at::Tensor& partial, const at::Tensor& residual, const Handle* bias, const Tp& tp) {
  if (!records({partial, residual})) return ScatterRows::run(partial, residual, bias, *tp.rows());
  return ScatterRows::apply(partial, maybe(residual), bias, tp.rows());
}

}  // namespace

Tp::Tp(const Group& group) : rank_(group.rank()), size_(group.size()), group_(group) {
  if (size_ == 1) return;
  rows_ = std::make_shared<RowExchange>(
      RowExchange{[group](const at::Tensor& mine) { return gather_flat(group, mine); },
                  [group](const at::Tensor& partial) { return scatter_flat(group, partial); }});
}

const RowExchange* Tp::rows() const {
  if (size_ > 1 && !rows_) throw Bug("tensor-parallel rank {} of {} has no group to run with", rank_, size_);
  return rows_.get();
}

at::Tensor Tp::gather(const at::Tensor& mine) const {
  if (size_ == 1) return mine.unsqueeze(0);
  return rows()->gather(mine.unsqueeze(0));
}

std::shared_ptr<const VocabSlice> Tp::vocabulary(const std::vector<TpPart>& parts) const {
  if (size_ == 1) return nullptr;
  return std::make_shared<VocabSlice>(
      VocabSlice{parts.at(rank_).begin, parts.back().end,
                 [tp = *this](const at::Tensor& mine) { return tp.gather(mine); }});
}

at::Tensor norm_column_linear(const at::Tensor& x, const Handle& norm, double eps, const Handle& weight,
                              const Handle* bias, bool keep_cheap, const Tp& tp) {
  if (!keep_cheap) return norm_linear(x, norm, eps, weight, bias, tp.rows());
  return linear(gather_rows(rms_norm(x, norm, eps), tp), weight, bias);
}

at::Tensor row_linear(const at::Tensor& x, const Handle& weight, const Handle* bias,
                      const at::Tensor& residual, const Tp& tp) {
  if (tp.size() == 1) return linear(x, weight, bias, residual);
  return scatter(linear(x, weight), residual, bias, tp);
}

at::Tensor swiglu_row_linear(const at::Tensor& gate_up, const Handle& weight, const Handle* bias,
                             const at::Tensor& residual, bool keep_cheap, const Tp& tp) {
  if (keep_cheap) return row_linear(swiglu(gate_up), weight, bias, residual, tp);
  if (tp.size() == 1) return swiglu_linear(gate_up, weight, bias, residual);
  return scatter(swiglu_linear(gate_up, weight, nullptr, {}), residual, bias, tp);
}

at::Tensor gather_rows(const at::Tensor& x, const Tp& tp) {
  if (tp.size() == 1) return x;
  return records({x}) ? GatherRows::apply(x, tp.rows()) : tp.rows()->gather(x);
}

at::Tensor gather_values(const at::Tensor& x, const Tp& tp) {
  if (tp.size() == 1) return x;
  return records({x}) ? GatherValues::apply(x, tp.rows(), int64_t{tp.rank()}) : tp.rows()->gather(x);
}

at::Tensor scatter_rows(const at::Tensor& x, const Tp& tp) {
  return tp.size() == 1 ? x : scatter(x, {}, nullptr, tp);
}

}  // namespace titanium
