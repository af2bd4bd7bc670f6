#include "titanium/ops/attention.h"

#include <ATen/ATen.h>

#include <cmath>

#include "titanium/ops/attention_kernel.h"
#include "titanium/ops/graph.h"
#include "titanium/ops/tile_gemm.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void check_bounds(const char* name, const std::vector<int64_t>& bounds, int64_t tokens) {
  if (bounds.empty() || bounds.front() != 0 || bounds.back() != tokens)
    throw Bug("attention: {} must run from 0 to {}; given {} entries ending with {}", name, tokens,
              bounds.size(), bounds.empty() ? 0 : bounds.back());
  for (size_t d = 0; d + 1 < bounds.size(); ++d)
    if (bounds[d] > bounds[d + 1])
      throw Bug("attention: {} must not fall; document {} runs from {} to {}", name, d, bounds[d],
                bounds[d + 1]);
}

AttentionShape check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionSpec& spec) {
  require(q.dim() == 3 && k.dim() == 3 && k.size(2) == q.size(2) && k.size(1) > 0 &&
              q.size(1) % k.size(1) == 0 && q.size(2) > 0,
          "attention", "q must be [Tq, N, H] and k [Tk, K, H], K dividing N", q, k);
  require(v.sizes() == k.sizes(), "attention", "k and v must have one shape", k, v);
  require(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type(), "attention",
          "q, k and v must have one dtype", q, k);
  const at::ScalarType dtype = q.scalar_type();
  require(dtype == at::kBFloat16 || dtype == at::kFloat || dtype == at::kDouble, "attention",
          "the dtype must be bfloat16, float32 or float64", q, k);
  check_bounds("q_bounds", spec.q_bounds, q.size(0));
  const bool starts = !spec.k_starts.empty();
  check_bounds("k_bounds", spec.k_bounds,
               starts && !spec.k_bounds.empty() ? spec.k_bounds.back() : k.size(0));
  if (spec.q_bounds.size() != spec.k_bounds.size())
    throw Bug("attention: q_bounds has {} entries and k_bounds {}", spec.q_bounds.size(),
              spec.k_bounds.size());
  for (size_t d = 0; d + 1 < spec.q_bounds.size(); ++d) {
    const int64_t queries = spec.q_bounds[d + 1] - spec.q_bounds[d],
                  keys = spec.k_bounds[d + 1] - spec.k_bounds[d];
    if (queries > keys) throw Bug("attention: document {} has {} queries and only {} keys", d, queries, keys);
    if (!starts) continue;
    const int64_t start = d < spec.k_starts.size() ? spec.k_starts[d] : -1;
    if (start < 0 || start + keys > k.size(0))
      throw Bug("attention: the {} keys of document {} start at {} of {}", keys, d, start, k.size(0));
  }
  const double scale = spec.scale == 0 ? 1 / std::sqrt(static_cast<double>(q.size(2))) : spec.scale;
  if (!(scale > 0) || !std::isfinite(scale))
    throw Bug("attention: scale must be positive and finite; given {}", scale);
  if (spec.window < 0) throw Bug("attention: window must be positive, or 0 for none; given {}", spec.window);
  return {q.size(1), k.size(1), q.size(2), spec.q_bounds, spec.k_bounds, spec.k_starts, spec.window, scale};
}

// What the kernel takes: dense rows of a multiple of 32 numbers, in fp32 where the CPU does not multiply
// bf16. Zeros at the end of a head change neither scores nor the output before them.
struct Operand {
  int64_t H, padded;
  at::ScalarType dtype;

  Operand(int64_t H, at::ScalarType wanted)
      : H(H),
        padded((H + 31) / 32 * 32),
        dtype(wanted == at::kBFloat16 && !has_bf16_tiles() ? at::kFloat : wanted) {}

  bool takes(const at::Tensor& x) const {
    return x.scalar_type() == dtype && padded == H && x.is_contiguous();
  }
  at::Tensor in(const at::Tensor& x) const {
    const at::Tensor wide = x.to(dtype);
    return padded == H ? wide.contiguous() : at::constant_pad_nd(wide, {0, padded - H});
  }
  at::Tensor empty(const at::Tensor& like) const {
    return at::empty({like.size(0), like.size(1), padded}, like.options().dtype(dtype));
  }
  at::Tensor out(const at::Tensor& x, at::ScalarType wanted) const {
    return (padded == H ? x : x.narrow(2, 0, H)).to(wanted).contiguous();
  }
};

template <typename F>
void by_dtype(at::ScalarType dtype, const F& f) {
  if (dtype == at::kBFloat16) {
    f(at::BFloat16());
  } else if (dtype == at::kFloat) {
    f(float());
  } else {
    f(double());
  }
}

// The keys (or values) of the documents, one after another.
at::Tensor seen(const at::Tensor& k, const AttentionSpec& spec) {
  std::vector<at::Tensor> parts;
  for (size_t d = 0; d < spec.k_starts.size(); ++d)
    parts.push_back(k.narrow(0, spec.k_starts[d], spec.k_bounds[d + 1] - spec.k_bounds[d]));
  return at::cat(parts);
}

// -> the output [Tq, N, H] in q's dtype and the log-sum-exp [N, Tq].
std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                          AttentionShape shape) {
  const Operand operand(shape.H, q.scalar_type());
  const at::Tensor query = operand.in(q), key = operand.in(k), value = operand.in(v);
  const at::Tensor out = operand.empty(q);
  const at::Tensor lse =
      at::empty({q.size(1), q.size(0)}, q.options().dtype(statistics_dtype(operand.dtype)));
  shape.H = operand.padded;
  by_dtype(operand.dtype, [&](auto type) {
    using T = decltype(type);
    attention_forward<T>(shape, query.const_data_ptr<T>(), key.const_data_ptr<T>(), value.const_data_ptr<T>(),
                         out.mutable_data_ptr<T>(), lse.mutable_data_ptr<Wide<T>>());
  });
  return {operand.out(out, q.scalar_type()), lse};
}

variable_list backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                       const at::Tensor& lse, const at::Tensor& d_out, AttentionShape shape) {
  const Operand operand(shape.H, q.scalar_type());
  const at::Tensor query = operand.in(q), key = operand.in(k), value = operand.in(v);
  const at::Tensor result = operand.in(out), grad = operand.in(d_out);
  const at::Tensor dq = operand.empty(q), dk = operand.empty(k), dv = operand.empty(v);
  shape.H = operand.padded;
  by_dtype(operand.dtype, [&](auto type) {
    using T = decltype(type);
    attention_backward<T>(shape, query.const_data_ptr<T>(), key.const_data_ptr<T>(),
                          value.const_data_ptr<T>(), result.const_data_ptr<T>(),
                          lse.const_data_ptr<Wide<T>>(), grad.const_data_ptr<T>(), dq.mutable_data_ptr<T>(),
                          dk.mutable_data_ptr<T>(), dv.mutable_data_ptr<T>());
  });
  return {operand.out(dq, q.scalar_type()), operand.out(dk, q.scalar_type()),
          operand.out(dv, q.scalar_type())};
}

struct AttentionFunction : torch::autograd::Function<AttentionFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const AttentionShape& shape) {
    auto [out, lse] = titanium::forward(q, k, v, shape);
    ctx->save_for_backward({q, k, v, out, lse});
    ctx->saved_data["q_bounds"] = shape.q_bounds;
    ctx->saved_data["k_bounds"] = shape.k_bounds;
    ctx->saved_data["window"] = shape.window;
    ctx->saved_data["scale"] = shape.scale;
    return out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    AttentionShape shape{q.size(1),
                         k.size(1),
                         q.size(2),
                         ctx->saved_data["q_bounds"].toIntVector(),
                         ctx->saved_data["k_bounds"].toIntVector(),
                         {},
                         ctx->saved_data["window"].toInt(),
                         ctx->saved_data["scale"].toDouble()};
    variable_list result = titanium::backward(q, k, v, saved[3], saved[4], grads[0], std::move(shape));
    result.emplace_back();
    return result;
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionSpec& spec) {
  AttentionShape shape = check(q, k, v, spec);
  if (!records({q, k, v})) {
    if (spec.k_starts.empty() || Operand(shape.H, q.scalar_type()).takes(k))
      return forward(q, k, v, std::move(shape)).first;
    shape.k_starts.clear();  // a copy is made, so of what is seen alone
    return forward(q, seen(k, spec), seen(v, spec), std::move(shape)).first;
  }
  if (!spec.k_starts.empty()) throw Bug("attention: with k_starts there is no gradient");
  return AttentionFunction::apply(q, k, v, shape);
}

}  // namespace titanium
