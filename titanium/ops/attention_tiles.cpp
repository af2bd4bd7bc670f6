#include "titanium/ops/attention_tiles.h"

namespace titanium {
namespace {

// A column's max is raised only when it would be beaten by 2^8, so that the sums are rarely rescaled.
constexpr int kSlack = 8;

// Two rows of one column group as pairs (bf16) or rows (otherwise).
TITANIUM_INLINE void store_pair(at::BFloat16* to, int, Vector<float> even, Vector<float> odd) {
  const BitVector<float> bits = (round_to_bf16(even) >> 16) | (round_to_bf16(odd) & 0xffff0000u);
  std::memcpy(to, &bits, sizeof bits);
}
template <typename A>
TITANIUM_INLINE void store_pair(A* to, int width, Vector<A> even, Vector<A> odd) {
  store(to, even);
  store(to + width, odd);
}

// One bound at a time: GCC compares vectors lane by lane when two comparisons meet in one choice.
template <typename A>
TITANIUM_INLINE void hide_keys_before(int width, const A* low, A* scores) {
  for (int c = 0; c < width; c += kLanes<A>) {
    const Vector<A> bound = load(low + c);
    for (int i = 0; i < kKeys; ++i) {
      A* at = scores + i * width + c;
      store(at, splat(static_cast<A>(i)) < bound ? splat(-kInfinity<A>) : load(at));
    }
  }
}
template <typename A>
TITANIUM_INLINE void hide_keys_from(int width, const A* high, A* scores) {
  for (int c = 0; c < width; c += kLanes<A>) {
    const Vector<A> bound = load(high + c);
    for (int i = 0; i < kKeys; ++i) {
      A* at = scores + i * width + c;
      store(at, splat(static_cast<A>(i)) < bound ? load(at) : splat(-kInfinity<A>));
    }
  }
}

template <typename A, typename T>
TITANIUM_INLINE bool softmax(int width, const A* scores, A scale, Running<A>& running, T* weights) {
  using V = Vector<A>;
  IntVector<A> changed = {};
  for (int c = 0; c < width; c += kLanes<A>) {
    V top[4] = {splat(-kInfinity<A>), splat(-kInfinity<A>), splat(-kInfinity<A>), splat(-kInfinity<A>)};
    for (int i = 0; i < kKeys; i += 4)
      for (int u = 0; u < 4; ++u) {
        const V s = load(scores + (i + u) * width + c);
        top[u] = s > top[u] ? s : top[u];
      }
    top[0] = top[0] > top[1] ? top[0] : top[1];
    top[2] = top[2] > top[3] ? top[2] : top[3];
    top[0] = top[0] > top[2] ? top[0] : top[2];

    const V before = load(running.max + c), here = top[0] * scale;
    const V max = here > before + static_cast<A>(kSlack) ? here : before;
    const V base = max == -kInfinity<A> ? V{} : max;  // a column that has seen no key yet
    const V shrink = exp2(before - base);
    changed |= max != before;
    store(running.max + c, max);
    store(running.shrink + c, shrink);

    V even = {}, odd = {};
    for (int i = 0; i < kKeys; i += 2) {
      const V p = exp2(load(scores + i * width + c) * scale - base);
      const V q = exp2(load(scores + (i + 1) * width + c) * scale - base);
      even += p;
      odd += q;
      store_pair(weights + i * width + c * kPair<T>, width, p, q);
    }
    store(running.sum + c, load(running.sum + c) * shrink + (even + odd));
  }
  for (int lane = 0; lane < kLanes<A>; ++lane)
    if (changed[lane]) return true;
  return false;
}

template <typename A>
TITANIUM_INLINE void scale_all(int rows, int width, const A* factor, A* sums) {
  for (int i = 0; i < rows; ++i)
    for (int c = 0; c < width; c += kLanes<A>)
      store(sums + i * width + c, load(sums + i * width + c) * load(factor + c));
}

template <typename A, typename T>
TITANIUM_INLINE void gradient(int width, const A* scores, const A* d_weights, A scale, const A* lse2,
                              const A* delta, T* weights, T* d_scores, T* d_scores_paired) {
  using V = Vector<A>;
  for (int c = 0; c < width; c += kLanes<A>) {
    const V base = load(lse2 + c), shift = load(delta + c);
    for (int i = 0; i < kKeys; i += 2) {
      const int at = i * width + c, next = at + width;
      const V p = exp2(load(scores + at) * scale - base), q = exp2(load(scores + next) * scale - base);
      const V dp = p * (load(d_weights + at) - shift), dq = q * (load(d_weights + next) - shift);
      store_narrow(weights + at, p);
      store_narrow(weights + next, q);
      store_narrow(d_scores + at, dp);
      store_narrow(d_scores + next, dq);
      if constexpr (kPair<T> == 2) store_pair(d_scores_paired + i * width + c * 2, width, dp, dq);
    }
  }
}

}  // namespace

TITANIUM_CLONES void hide_before(int width, const float* low, float* scores) {
  hide_keys_before(width, low, scores);
}
TITANIUM_CLONES void hide_before(int width, const double* low, double* scores) {
  hide_keys_before(width, low, scores);
}
TITANIUM_CLONES void hide_from(int width, const float* high, float* scores) {
  hide_keys_from(width, high, scores);
}
TITANIUM_CLONES void hide_from(int width, const double* high, double* scores) {
  hide_keys_from(width, high, scores);
}

TITANIUM_CLONES bool softmax_step(int width, const float* scores, float scale, Running<float>& running,
                                  at::BFloat16* weights) {
  return softmax(width, scores, scale, running, weights);
}
TITANIUM_CLONES bool softmax_step(int width, const float* scores, float scale, Running<float>& running,
                                  float* weights) {
  return softmax(width, scores, scale, running, weights);
}
TITANIUM_CLONES bool softmax_step(int width, const double* scores, double scale, Running<double>& running,
                                  double* weights) {
  return softmax(width, scores, scale, running, weights);
}

TITANIUM_CLONES void scale_columns(int rows, int width, const float* factor, float* sums) {
  scale_all(rows, width, factor, sums);
}
TITANIUM_CLONES void scale_columns(int rows, int width, const double* factor, double* sums) {
  scale_all(rows, width, factor, sums);
}

TITANIUM_CLONES void gradient_step(int width, const float* scores, const float* d_weights, float scale,
                                   const float* lse2, const float* delta, at::BFloat16* weights,
                                   at::BFloat16* d_scores, at::BFloat16* d_scores_paired) {
  gradient(width, scores, d_weights, scale, lse2, delta, weights, d_scores, d_scores_paired);
}
TITANIUM_CLONES void gradient_step(int width, const float* scores, const float* d_weights, float scale,
                                   const float* lse2, const float* delta, float* weights, float* d_scores,
                                   float* d_scores_paired) {
  gradient(width, scores, d_weights, scale, lse2, delta, weights, d_scores, d_scores_paired);
}
TITANIUM_CLONES void gradient_step(int width, const double* scores, const double* d_weights, double scale,
                                   const double* lse2, const double* delta, double* weights, double* d_scores,
                                   double* d_scores_paired) {
  gradient(width, scores, d_weights, scale, lse2, delta, weights, d_scores, d_scores_paired);
}

}  // namespace titanium
