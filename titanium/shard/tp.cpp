#include "titanium/shard/tp.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/ops/graph.h"

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

struct ScatterRows : Function<ScatterRows> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& partial, const RowExchange* rows) {
    keep_address(ctx, "rows", rows);
    return rows->scatter(partial.detach()).clone();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    return {kept_address<RowExchange>(ctx, "rows")->gather(grads[0].contiguous()), {}};
  }
};

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
                 [tp = *this](const at::Tensor& mine) { return tp.gather(mine); }, rows_.get()});
}

at::Tensor gather_values(const at::Tensor& x, const Tp& tp) {
  if (tp.size() == 1) return x;
  return records({x}) ? GatherValues::apply(x, tp.rows(), int64_t{tp.rank()}) : tp.rows()->gather(x);
}

at::Tensor scatter_rows(const at::Tensor& x, const Tp& tp) {
  if (tp.size() == 1) return x;
  return records({x}) ? ScatterRows::apply(x, tp.rows()) : tp.rows()->scatter(x).clone();
}

}  // namespace titanium
