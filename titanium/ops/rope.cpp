#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "titanium/ops/attention.h"
#include "titanium/ops/graph.h"
#include "titanium/ops/vector.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Tokens whose gradients of the norm weights are added up together; the sums of the groups are then added in
// order.
constexpr int64_t kGroup = 64;
constexpr int64_t kMostWidth = 1024;  // H; a head is worked on in buffers on the stack

// One call on plain pointers.  A is Wide<T>.
template <typename T>
struct Rope {
  using A = Wide<T>;
  int64_t N, K, H;
  const A *cos, *sin;            // [T, H / 2]
  const A *q_weight, *k_weight;  // [H], or null
  A eps;
};

template <typename A>
struct alignas(64) Head {
  A at[kMostWidth];
};

template <typename T>
TITANIUM_INLINE void widen(int64_t n, const T* from, Wide<T>* to) {
  int64_t i = 0;
  for (; i + kLanes<Wide<T>> <= n; i += kLanes<Wide<T>>) store(to + i, load_wide(from + i));
  for (; i < n; ++i) to[i] = static_cast<Wide<T>>(from[i]);
}
template <typename T>
TITANIUM_INLINE void narrow(int64_t n, const Wide<T>* from, T* to) {
  int64_t i = 0;
  for (; i + kLanes<Wide<T>> <= n; i += kLanes<Wide<T>>) store_narrow(to + i, load(from + i));
  for (; i < n; ++i) to[i] = static_cast<T>(from[i]);
}

template <typename A>
TITANIUM_INLINE A dot(int64_t n, const A* a, const A* b) {
  Vector<A> lanes = {};
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) lanes += load(a + i) * load(b + i);
  A sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (int lane = 0; lane < kLanes<A>; ++lane) sum += lanes[lane];
  return sum;
}

// x [H] -> 1 / rms, and x times it.
template <typename A>
TITANIUM_INLINE A normalise(int64_t H, A eps, A* x) {
  const A scale = 1 / std::sqrt(dot(H, x, x) / static_cast<A>(H) + eps);
  for (int64_t h = 0; h < H; ++h) x[h] *= scale;
  return scale;
}

// Turns the pairs (x[h], x[h + H / 2]) by their angles; backwards for sign -1.
template <typename A>
TITANIUM_INLINE void turn(int64_t half, A sign, const A* cos, const A* sin, A* __restrict x,
                          A* __restrict y) {
  for (int64_t h = 0; h < half; ++h) {
    const A a = x[h], b = y[h], s = sign * sin[h];
    x[h] = a * cos[h] - b * s;
    y[h] = b * cos[h] + a * s;
  }
}

template <typename T>
TITANIUM_INLINE void forward_rows(const Rope<T>& r, int64_t begin, int64_t end, const T* qkv, T* q, T* k,
                                  T* v) {
  using A = Wide<T>;
  Head<A> head;
  const int64_t half = r.H / 2;
  for (int64_t t = begin; t < end; ++t) {
    const T* from = qkv + t * (r.N + 2 * r.K) * r.H;
    for (int64_t n = 0; n < r.N + r.K; ++n, from += r.H) {
      const A* weight = n < r.N ? r.q_weight : r.k_weight;
      T* to = n < r.N ? q + (t * r.N + n) * r.H : k + (t * r.K + n - r.N) * r.H;
      widen(r.H, from, head.at);
      if (weight != nullptr) {
        normalise(r.H, r.eps, head.at);
        for (int64_t h = 0; h < r.H; ++h) head.at[h] *= weight[h];
      }
      turn<A>(half, 1, r.cos + t * half, r.sin + t * half, head.at, head.at + half);
      narrow(r.H, head.at, to);
    }
    std::memcpy(v + t * r.K * r.H, from, sizeof(T) * r.K * r.H);
  }
}

// d_weights [2][H]: what these rows add to the gradients of q_weight and k_weight.
template <typename T>
TITANIUM_INLINE void backward_rows(const Rope<T>& r, int64_t begin, int64_t end, const T* qkv, const T* dq,
                                   const T* dk, const T* dv, T* d_qkv, Wide<T>* d_weights) {
  using A = Wide<T>;
  Head<A> grad, unit;
  const int64_t half = r.H / 2;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t row = t * (r.N + 2 * r.K) * r.H;
    for (int64_t n = 0; n < r.N + r.K; ++n) {
      const A* weight = n < r.N ? r.q_weight : r.k_weight;
      widen(r.H, n < r.N ? dq + (t * r.N + n) * r.H : dk + (t * r.K + n - r.N) * r.H, grad.at);
      turn<A>(half, -1, r.cos + t * half, r.sin + t * half, grad.at, grad.at + half);
      if (weight != nullptr) {
        widen(r.H, qkv + row + n * r.H, unit.at);
        const A scale = normalise(r.H, r.eps, unit.at);
        A* sum = d_weights + (n < r.N ? 0 : r.H);
        for (int64_t h = 0; h < r.H; ++h) sum[h] += grad.at[h] * unit.at[h];
        for (int64_t h = 0; h < r.H; ++h) grad.at[h] *= weight[h];
        const A mean = dot(r.H, grad.at, unit.at) / static_cast<A>(r.H);
        for (int64_t h = 0; h < r.H; ++h) grad.at[h] = scale * (grad.at[h] - unit.at[h] * mean);
      }
      narrow(r.H, grad.at, d_qkv + row + n * r.H);
    }
    std::memcpy(d_qkv + row + (r.N + r.K) * r.H, dv + t * r.K * r.H, sizeof(T) * r.K * r.H);
  }
}

#define TITANIUM_ROWS(T)                                                                                     \
  TITANIUM_CLONES void forward_chunk(const Rope<T>& r, int64_t begin, int64_t end, const T* qkv, T* q, T* k, \
                                     T* v) {                                                                 \
    forward_rows(r, begin, end, qkv, q, k, v);                                                               \
  }                                                                                                          \
  TITANIUM_CLONES void backward_chunk(const Rope<T>& r, int64_t begin, int64_t end, const T* qkv,            \
                                      const T* dq, const T* dk, const T* dv, T* d_qkv, Wide<T>* d_weights) { \
    backward_rows(r, begin, end, qkv, dq, dk, dv, d_qkv, d_weights);                                         \
  }
TITANIUM_ROWS(at::BFloat16)
TITANIUM_ROWS(float)
TITANIUM_ROWS(double)
#undef TITANIUM_ROWS

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

struct RopeFunction : torch::autograd::Function<RopeFunction> {
  struct Args {
    int64_t N, K, H;
    const Handle *q_norm, *k_norm;
    double eps;
  };

  // The norm weights, widened, which must outlive the Rope that points at them.
  struct Weights {
    at::Tensor q, k;
    Weights(const Args& a, at::ScalarType wide) {
      if (a.q_norm != nullptr) q = a.q_norm->value().to(wide).contiguous();
      if (a.k_norm != nullptr) k = a.k_norm->value().to(wide).contiguous();
    }
  };
  template <typename T>
  static Rope<T> rope(const Args& a, const at::Tensor& cos, const at::Tensor& sin, const Weights& weights) {
    using A = Wide<T>;
    return {a.N,
            a.K,
            a.H,
            cos.const_data_ptr<A>(),
            sin.const_data_ptr<A>(),
            weights.q.defined() ? weights.q.const_data_ptr<A>() : nullptr,
            weights.k.defined() ? weights.k.const_data_ptr<A>() : nullptr,
            static_cast<A>(a.eps)};
  }

  static variable_list run(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                           const Args& a) {
    const int64_t tokens = qkv.size(0);
    const Weights weights(a, cos.scalar_type());
    const at::Tensor q = at::empty({tokens, a.N, a.H}, qkv.options()),
                     k = at::empty({tokens, a.K, a.H}, qkv.options()),
                     v = at::empty({tokens, a.K, a.H}, qkv.options());
    by_dtype(qkv.scalar_type(), [&](auto type) {
      using T = decltype(type);
      const Rope<T> r = rope<T>(a, cos, sin, weights);
      const T* from = qkv.const_data_ptr<T>();
      T *to_q = q.mutable_data_ptr<T>(), *to_k = k.mutable_data_ptr<T>(), *to_v = v.mutable_data_ptr<T>();
      at::parallel_for(0, tokens, 16, [&](int64_t begin, int64_t end) {
        forward_chunk(r, begin, end, from, to_q, to_k, to_v);
      });
    });
    return {q, k, v};
  }

  static variable_list forward(AutogradContext* ctx, const at::Tensor& qkv, const at::Tensor& cos,
                               const at::Tensor& sin, const Args& a) {
    const bool has_norm = a.q_norm != nullptr || a.k_norm != nullptr;
    ctx->save_for_backward({has_norm ? qkv : at::Tensor(), cos, sin});
    keep_handle(ctx, "q_norm", a.q_norm);
    keep_handle(ctx, "k_norm", a.k_norm);
    ctx->saved_data["shape"] = std::vector<int64_t>{a.N, a.K, a.H};
    ctx->saved_data["eps"] = a.eps;
    return run(qkv, cos, sin, a);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::vector<int64_t> shape = ctx->saved_data["shape"].toIntVector();
    const Args a{shape[0],
                 shape[1],
                 shape[2],
                 kept_handle(ctx, "q_norm"),
                 kept_handle(ctx, "k_norm"),
                 ctx->saved_data["eps"].toDouble()};
    const at::Tensor &qkv = saved[0], &cos = saved[1], &sin = saved[2];
    const Weights weights(a, cos.scalar_type());
    const at::Tensor dq = grads[0].contiguous(), dk = grads[1].contiguous(), dv = grads[2].contiguous();
    const int64_t tokens = dq.size(0), groups = (tokens + kGroup - 1) / kGroup;
    const at::Tensor d_qkv = at::empty({tokens, (a.N + 2 * a.K) * a.H}, dq.options());
    const at::Tensor d_weights = at::zeros({groups, 2, a.H}, cos.options());
    by_dtype(dq.scalar_type(), [&](auto type) {
      using T = decltype(type);
      using A = Wide<T>;
      const Rope<T> r = rope<T>(a, cos, sin, weights);
      const T* from = qkv.defined() ? qkv.const_data_ptr<T>() : nullptr;
      const T *q = dq.const_data_ptr<T>(), *k = dk.const_data_ptr<T>(), *v = dv.const_data_ptr<T>();
      T* to = d_qkv.mutable_data_ptr<T>();
      A* sums = d_weights.mutable_data_ptr<A>();
      at::parallel_for(0, groups, 1, [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g)
          backward_chunk(r, g * kGroup, std::min(tokens, (g + 1) * kGroup), from, q, k, v, to,
                         sums + g * 2 * a.H);
      });
      for (int64_t g = 1; g < groups; ++g)
        for (int64_t i = 0; i < 2 * a.H; ++i) sums[i] += sums[g * 2 * a.H + i];
    });
    const Handle* const norms[] = {a.q_norm, a.k_norm};
    for (int i = 0; i < 2; ++i) {
      if (!trains(norms[i]) || groups == 0) continue;
      const at::Tensor dw = d_weights.select(0, 0).select(0, i).clone();
      norms[i]->accumulate([dw](const at::Tensor& sink) { sink.add_(dw); });
    }
    return {d_qkv, {}, {}, {}};
  }
};

}  // namespace

RopeAngles rope_angles(const at::Tensor& positions, const std::vector<double>& inv_freq,
                       double attention_factor, at::ScalarType dtype) {
  const at::Tensor frequencies = at::tensor(inv_freq, at::kDouble);
  const at::Tensor angles = positions.to(at::kDouble).unsqueeze(-1) * frequencies;
  return {(angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> split_rope(const at::Tensor& qkv, int64_t N, int64_t K,
                                                          int64_t H, const RopeAngles& angles,
                                                          const Handle* q_norm, const Handle* k_norm,
                                                          double eps) {
  require(N > 0 && K > 0 && H > 0 && H % 2 == 0 && H <= kMostWidth, "split_rope",
          "N and K must be positive, H even and at most 1024", qkv, angles.cos);
  require(qkv.dim() == 2 && qkv.size(1) == (N + 2 * K) * H, "split_rope", "qkv must be [T, (N + 2 K) H]", qkv,
          angles.cos);
  require(
      angles.cos.sizes() == at::IntArrayRef({qkv.size(0), H / 2}) && angles.sin.sizes() == angles.cos.sizes(),
      "split_rope", "cos and sin must be [T, H / 2]", angles.cos, angles.sin);
  const at::ScalarType wide = statistics_dtype(qkv.scalar_type());
  require(angles.cos.scalar_type() == wide && angles.sin.scalar_type() == wide, "split_rope",
          "cos and sin must be float32 (float64 for a float64 qkv)", angles.cos, qkv);
  for (const Handle* norm : {q_norm, k_norm})
    if (norm != nullptr)
      require(norm->value().sizes() == at::IntArrayRef({H}), "split_rope", "a norm weight must be [H]",
              norm->value(), qkv);
  const at::Tensor x = qkv.contiguous(), cos = angles.cos.contiguous(), sin = angles.sin.contiguous();
  const RopeFunction::Args args{N, K, H, q_norm, k_norm, eps};
  const variable_list out =
      records({x}) ? RopeFunction::apply(x, cos, sin, args) : RopeFunction::run(x, cos, sin, args);
  return {out[0], out[1], out[2]};
}

}  // namespace titanium
