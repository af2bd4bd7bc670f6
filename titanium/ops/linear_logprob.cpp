#include "titanium/ops/linear_logprob.h"

#include <ATen/ATen.h>

#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kChunkElements = int64_t{1} << 24;  // logits held at once

int64_t rows_a_chunk(int64_t V) {
  return std::max<int64_t>(1, kChunkElements / V);
}

// What a chunk of rows needs; every tensor is over the selected rows R.
struct Rows {
  at::Tensor x, labels, temperature, index;  // [R, D], [R], [R] or undefined, [R] or undefined
};

Rows select(const at::Tensor& x, const at::Tensor& labels, const at::Tensor& temperature,
            const at::Tensor& rows) {
  const auto pick = [&](const at::Tensor& t) {
    return t.defined() && rows.defined() ? t.index_select(0, rows) : t;
  };
  return {pick(x), pick(labels), pick(temperature), rows};
}

at::Tensor spread(const at::Tensor& values, const at::Tensor& rows, int64_t T) {
  if (!rows.defined() || !values.defined()) return values;
  std::vector<int64_t> shape = values.sizes().vec();
  shape[0] = T;
  return at::zeros(shape, values.options()).index_copy_(0, rows, values);
}

at::Tensor chunk_logits(const at::Tensor& x, const at::Tensor& w, const at::Tensor& temperature) {
  const at::ScalarType dtype = statistics_dtype(x.scalar_type());
  at::Tensor z = at::mm(x.to(dtype), w.to(dtype).t());
  if (temperature.defined()) z.div_(temperature.unsqueeze(1));
  return z;
}

struct Values {
  at::Tensor logprob, entropy, sum_pi_squared, lse;  // [R]
};

Values head_forward(const Rows& rows, const at::Tensor& w) {
  const int64_t R = rows.x.size(0), step = rows_a_chunk(w.size(0));
  const auto options = rows.x.options().dtype(statistics_dtype(rows.x.scalar_type()));
  Values out{at::zeros({R}, options), at::zeros({R}, options), at::zeros({R}, options),
             at::zeros({R}, options)};
  for (int64_t r = 0; r < R; r += step) {
    const int64_t n = std::min(step, R - r);
    const at::Tensor z =
        chunk_logits(rows.x.narrow(0, r, n), w,
                     rows.temperature.defined() ? rows.temperature.narrow(0, r, n) : at::Tensor());
    const at::Tensor lse = z.logsumexp(1), label = rows.labels.narrow(0, r, n);
    const at::Tensor target = z.gather(1, label.clamp_min(0).unsqueeze(1)).squeeze(1);
    const at::Tensor logp = z - lse.unsqueeze(1), p = logp.exp();
    out.logprob.narrow(0, r, n).copy_(at::where(label >= 0, target - lse, at::zeros_like(lse)));
    out.entropy.narrow(0, r, n).copy_(-at::where(p > 0, p * logp, at::zeros_like(p)).sum(1));
    out.sum_pi_squared.narrow(0, r, n).copy_(p.square().sum(1));
    out.lse.narrow(0, r, n).copy_(lse);
  }
  return out;
}

struct Gradients {
  at::Tensor logprob, entropy, sum_pi_squared;  // [R], undefined = none
};

// Adds the head's gradient through `weight` and returns that of rows.x.
at::Tensor head_backward(const Rows& rows, const Handle& weight, const Values& values, const Gradients& g) {
  const at::Tensor w = weight.value();
  const int64_t R = rows.x.size(0), step = rows_a_chunk(w.size(0));
  at::Tensor dx = at::empty_like(rows.x);
  for (int64_t r = 0; r < R; r += step) {
    const int64_t n = std::min(step, R - r);
    const auto part = [&](const at::Tensor& t) { return t.defined() ? t.narrow(0, r, n) : t; };
    const at::Tensor x = part(rows.x), temperature = part(rows.temperature), label = part(rows.labels);
    const at::Tensor logp = chunk_logits(x, w, temperature) - part(values.lse).unsqueeze(1), p = logp.exp();
    at::Tensor dz = at::zeros_like(p);
    if (g.logprob.defined()) {
      const at::Tensor scale =
          at::where(label >= 0, part(g.logprob), at::zeros_like(part(g.logprob))).unsqueeze(1);
      dz.sub_(p * scale).scatter_add_(1, label.clamp_min(0).unsqueeze(1), scale);
    }
    if (g.entropy.defined())
      dz.sub_(at::where(p > 0, p * (logp + part(values.entropy).unsqueeze(1)), at::zeros_like(p)) *
              part(g.entropy).unsqueeze(1));
    if (g.sum_pi_squared.defined())
      dz.add_(2 * p * (p - part(values.sum_pi_squared).unsqueeze(1)) * part(g.sum_pi_squared).unsqueeze(1));
    if (temperature.defined()) dz.div_(temperature.unsqueeze(1));
    const at::Tensor narrow = dz.to(x.scalar_type());
    dx.narrow(0, r, n).copy_(at::mm(narrow, w));
    if (weight.trainable())
      weight.accumulate([narrow, x](const at::Tensor& sink) { add_outer(sink, narrow, x); });
  }
  return dx;
}

struct HeadFunction : torch::autograd::Function<HeadFunction> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const Handle* weight,
                               const at::Tensor& labels, const MaybeTensor& maybe_temperature,
                               const MaybeTensor& maybe_index, HeadWants wants) {
    const at::Tensor temperature = or_none(maybe_temperature), index = or_none(maybe_index);
    const Rows rows = select(x, labels, temperature, index);
    const Values out = head_forward(rows, weight->value());
    keep_handle(ctx, "weight", weight);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, labels, temperature, index, out.lse, out.entropy, out.sum_pi_squared});
    variable_list result{spread(out.logprob, index, x.size(0))};
    if (wants.entropy) result.push_back(spread(out.entropy, index, x.size(0)));
    if (wants.sum_pi_squared) result.push_back(spread(out.sum_pi_squared, index, x.size(0)));
    ctx->saved_data["entropy"] = wants.entropy;
    return result;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor& index = saved[3];
    const auto pick = [&](const at::Tensor& t) {
      return t.defined() && index.defined() ? t.index_select(0, index) : t;
    };
    Gradients g;
    g.logprob = pick(grads[0]);
    size_t next = 1;
    if (ctx->saved_data["entropy"].toBool()) g.entropy = pick(grads[next++]);
    if (next < grads.size()) g.sum_pi_squared = pick(grads[next]);
    const Values values{{}, saved[5], saved[6], saved[4]};
    const at::Tensor dx =
        head_backward(select(saved[0], saved[1], saved[2], index), *kept_handle(ctx, "weight"), values, g);
    return {spread(dx, index, saved[0].size(0)), {}, {}, {}, {}, {}};
  }
};

struct WeightedNllFunction : torch::autograd::Function<WeightedNllFunction> {
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

void check(const at::Tensor& x, const at::Tensor& w, const at::Tensor& labels) {
  require(x.dim() == 2 && w.dim() == 2 && x.size(1) == w.size(1) && x.scalar_type() == w.scalar_type(),
          "head", "x is [T, D] and the weight [V, D], of one dtype", x, w);
  require(labels.dim() == 1 && labels.size(0) == x.size(0), "head", "labels are [T]", labels, x);
  const at::Tensor flat = labels.contiguous();
  const int64_t* label = flat.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < flat.numel(); ++t)
    if (label[t] >= w.size(0))
      throw BadData("token {} of the batch has label {}; the head knows 0 to {}", t, label[t], w.size(0) - 1);
}

}  // namespace

HeadStats linear_logprob(const at::Tensor& x, const Handle& weight, const at::Tensor& labels,
                         const at::Tensor& temperature, const at::Tensor& rows, HeadWants wants) {
  check(x, weight.value(), labels);
  if (records({x})) {
    const variable_list out = HeadFunction::apply(x, &weight, labels, maybe(temperature), maybe(rows), wants);
    HeadStats stats;
    stats.logprob = out[0];
    if (wants.entropy) stats.entropy = out[1];
    if (wants.sum_pi_squared) stats.sum_pi_squared = out.back();
    return stats;
  }
  const Values out = head_forward(select(x, labels, temperature, rows), weight.value());
  return {spread(out.logprob, rows, x.size(0)),
          wants.entropy ? spread(out.entropy, rows, x.size(0)) : at::Tensor(),
          wants.sum_pi_squared ? spread(out.sum_pi_squared, rows, x.size(0)) : at::Tensor()};
}

WeightedNll weighted_nll(const at::Tensor& x, const Handle& weight, const at::Tensor& labels,
                         const at::Tensor& weights, const at::Tensor& temperature, const at::Tensor& rows) {
  check(x, weight.value(), labels);
  const bool with_gradient = records({x});
  const at::NoGradGuard guard;
  const Rows picked = select(x, labels, temperature, rows);
  const Values out = head_forward(picked, weight.value());
  const at::Tensor w = rows.defined() ? weights.index_select(0, rows) : weights;
  at::Tensor loss = -(w.to(at::kDouble) * out.logprob.to(at::kDouble)).sum();
  loss = loss.to(out.logprob.scalar_type());
  const at::Tensor logprob = spread(out.logprob, rows, x.size(0));
  if (!with_gradient) return {loss, logprob};
  const at::Tensor dx = spread(head_backward(picked, weight, out, {-w, {}, {}}), rows, x.size(0));
  const at::AutoGradMode on(true);
  return {WeightedNllFunction::apply(x, loss, dx), logprob};
}

at::Tensor logits(const at::Tensor& x, const Handle& weight) {
  const at::NoGradGuard guard;
  return chunk_logits(x, weight.value(), {});
}

}  // namespace titanium
