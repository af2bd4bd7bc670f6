#include "titanium/ops/linear_logprob.h"

#include <ATen/ATen.h>

#include "titanium/ops/graph.h"
#include "titanium/ops/head.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The entries of t [T, ...] at `rows`; t itself where rows are undefined.
at::Tensor pick(const at::Tensor& t, const at::Tensor& rows) {
  return t.defined() && rows.defined() ? t.index_select(0, rows) : t;
}

// The other way: [R, ...] into zeros [T, ...].
at::Tensor spread(const at::Tensor& values, const at::Tensor& rows, int64_t T) {
  if (!rows.defined() || !values.defined()) return values;
  std::vector<int64_t> shape = values.sizes().vec();
  shape[0] = T;
  return at::zeros(shape, values.options()).index_copy_(0, rows, values);
}

// What a pass over the head is given; not a Variable of the graph but x.
struct HeadInput {
  const Handle& weight;
  at::Tensor labels, temperature, rows;
  const VocabSlice* slice;

  int64_t tokens() const { return labels.size(0); }
};

bool cut(const VocabSlice* slice) {
  return slice != nullptr && slice->rows != nullptr;
}

// The gradient by x [T, D], rounded once, from that by the rows that were computed.
at::Tensor by_x(const at::Tensor& dx, const at::Tensor& rows, int64_t T, at::ScalarType dtype,
                const VocabSlice* slice) {
  if (!cut(slice)) return spread(dx.to(dtype).contiguous(), rows, T);
  return slice->rows->scatter(spread(dx, rows, T).contiguous()).to(dtype).contiguous();
}

// The tokens of all ranks, of which a pass computes the rows.
HeadTokens select(const at::Tensor& mine, const HeadInput& in) {
  const at::Tensor x = cut(in.slice) ? in.slice->rows->gather(mine) : mine;
  const at::Tensor temperature = pick(in.temperature, in.rows);
  return {pick(x, in.rows).contiguous(), pick(in.labels, in.rows).contiguous(),
          temperature.defined() ? temperature.contiguous() : temperature, in.slice};
}

HeadStats spread_all(const HeadValues& out, const HeadInput& in, int64_t T, HeadWants wants) {
  return {spread(out.logprob, in.rows, T), wants.entropy ? spread(out.entropy, in.rows, T) : at::Tensor(),
          wants.sum_pi_squared ? spread(out.sum_pi_squared, in.rows, T) : at::Tensor()};
}

struct HeadFunction : torch::autograd::Function<HeadFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const HeadInput& in,
                               HeadWants wants) {
    const HeadTokens rows = select(x, in);
    const HeadValues out = head_forward(rows, in.weight.value(), wants.entropy || wants.sum_pi_squared);
    keep_handle(ctx, "weight", &in.weight);
    ctx->set_materialize_grads(false);
    keep_address(ctx, "slice", in.slice);
    ctx->saved_data["tokens"] = in.tokens();
    ctx->saved_data["entropy"] = wants.entropy;
    ctx->save_for_backward(
        {rows.x, rows.labels, rows.temperature, in.rows, out.lse, out.entropy, out.sum_pi_squared});
    const HeadStats stats = spread_all(out, in, in.tokens(), wants);
    variable_list result{stats.logprob};
    if (wants.entropy) result.push_back(stats.entropy);
    if (wants.sum_pi_squared) result.push_back(stats.sum_pi_squared);
    return result;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& index = saved[3];
    const auto gradient = [&](size_t i) {
      const at::Tensor g = pick(grads[i], index);
      return g.defined() ? g.contiguous() : g;
    };
    const size_t squares = ctx->saved_data["entropy"].toBool() ? 2 : 1;
    HeadGradients g{gradient(0), squares == 2 ? gradient(1) : at::Tensor(),
                    squares < grads.size() ? gradient(squares) : at::Tensor()};
    const auto* slice = kept_address<VocabSlice>(ctx, "slice");
    const at::Tensor dx = head_backward({saved[0], saved[1], saved[2], slice}, *kept_handle(ctx, "weight"),
                                        {saved[4], {}, saved[5], saved[6]}, g);
    return {by_x(dx, index, ctx->saved_data["tokens"].toInt(), saved[0].scalar_type(), slice), {}, {}};
  }
};

// Hands out the gradient that the forward has formed already.
struct FormedGradient : torch::autograd::Function<FormedGradient> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& loss,
                            const at::Tensor& dx) {
    (void)x;
    ctx->save_for_backward({dx});
    return loss.clone();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const double g = grads[0].item<double>();
    if (g != 1.0)
      throw Bug(
          "weighted_nll: its gradient by the objective must be 1, for the weights hold every scale; given {}",
          g);
    return {ctx->get_saved_variables()[0], {}, {}};
  }
};

// `op` is given what its header says, or a Bug or BadData says what not.
void check(const char* op, const at::Tensor& x, const HeadInput& in) {
  const at::Tensor w = in.weight.value();
  const at::ScalarType statistics = statistics_dtype(x.scalar_type());
  require(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(), op,
          "x is [T, D] and the weight [V, D], of one dtype", x, w);
  require(in.labels.dim() == 1 && (in.tokens() == x.size(0) || cut(in.slice)) &&
              in.labels.scalar_type() == at::kLong,
          op, "labels are [T] int64", in.labels, x);
  if (in.rows.defined())
    require(in.rows.dim() == 1 && in.rows.scalar_type() == at::kLong, op, "rows are [R] int64", in.rows, x);
  const at::Tensor labels = in.labels.contiguous();
  const int64_t* label = labels.const_data_ptr<int64_t>();
  const int64_t V = in.slice == nullptr ? w.size(0) : in.slice->vocabulary;
  for (int64_t t = 0; t < labels.numel(); ++t)
    if (label[t] >= V)
      throw BadData("token {} of the batch has label {}; the head knows 0 to {}", t, label[t], V - 1);
  if (!in.temperature.defined()) return;
  require(in.temperature.dim() == 1 && in.temperature.size(0) == in.tokens() &&
              in.temperature.scalar_type() == statistics,
          op, "the temperature is [T] in the statistics' dtype", in.temperature, x);
  if (in.tokens() > 0 && !(in.temperature.min().item<double>() > 0))
    throw BadData("the temperature of every token must be above 0; given {}",
                  in.temperature.min().item<double>());
}

}  // namespace

HeadStats linear_logprob(const at::Tensor& x, const Handle& weight, const at::Tensor& labels,
                         const at::Tensor& temperature, const at::Tensor& rows, HeadWants wants,
                         const VocabSlice* slice) {
  const HeadInput in{weight, labels, temperature, rows, slice};
  check("linear_logprob", x, in);
  if (!records({x})) {
    const bool moments = wants.entropy || wants.sum_pi_squared;
    return spread_all(head_forward(select(x, in), weight.value(), moments), in, in.tokens(), wants);
  }
  const variable_list out = HeadFunction::apply(x, in, wants);
  HeadStats stats;
  stats.logprob = out[0];
  if (wants.entropy) stats.entropy = out[1];
  if (wants.sum_pi_squared) stats.sum_pi_squared = out.back();
  return stats;
}

WeightedNll weighted_nll(const at::Tensor& x, const Handle& weight, const at::Tensor& labels,
                         const at::Tensor& weights, const at::Tensor& temperature, const at::Tensor& rows,
                         const VocabSlice* slice) {
  const HeadInput in{weight, labels, temperature, rows, slice};
  check("weighted_nll", x, in);
  require(weights.dim() == 1 && weights.size(0) == in.tokens() &&
              weights.scalar_type() == statistics_dtype(x.scalar_type()),
          "weighted_nll", "weights are [T] in the statistics' dtype", weights, x);
  const bool with_gradient = records({x});
  at::Tensor loss, logprob, dx;
  {
    const at::AutoGradMode off(false);
    const HeadTokens picked = select(x, in);
    const at::Tensor w = pick(weights, rows).contiguous();
    HeadValues out;
    if (with_gradient) {
      dx = by_x(head_nll(picked, weight, w, &out), rows, in.tokens(), x.scalar_type(), slice);
    } else {
      out = head_forward(picked, weight.value(), false);
    }
    loss = -(w.to(at::kDouble) * out.logprob.to(at::kDouble)).sum().to(out.logprob.scalar_type());
    logprob = spread(out.logprob, rows, in.tokens());
  }
  if (!with_gradient) return {loss, logprob};
  return {FormedGradient::apply(x, loss, dx), logprob};
}

at::Tensor logits(const at::Tensor& x, const Handle& weight, const VocabSlice* slice) {
  const at::AutoGradMode off(false);
  const at::Tensor w = weight.value();
  require(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(),
          "logits", "x is [T, D] and the weight [V, D], of one dtype", x, w);
  return head_logits(x, w, weight.packed(), slice);
}

}  // namespace titanium
