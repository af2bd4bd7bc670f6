#include "titanium/ops/head_rows.h"

#include <algorithm>
#include <cmath>

namespace titanium {
namespace {

template <typename A>
constexpr A kLog2e = static_cast<A>(1.44269504088896340736);
template <typename A>
constexpr A kLeast = static_cast<A>(sizeof(A) == 4 ? -150
                                                   : -1100);  // exp is 0 below, and d exp(d) stays a number

template <typename A>
TITANIUM_INLINE Vector<A> exponential(Vector<A> x) {
  return exp2(x * kLog2e<A>);
}

// Up to kLanes logits, `beyond` where there are none.
template <typename A>
TITANIUM_INLINE Vector<A> load_logits(const A* z, int64_t n, A scale, A beyond) {
  if (n >= kLanes<A>) return load(z) * scale;
  Vector<A> v = splat(beyond);
  for (int64_t i = 0; i < n; ++i) v[i] = z[i] * scale;
  return v;
}

template <typename A>
TITANIUM_INLINE double sum_lanes(Vector<A> v) {
  double total = 0;
  for (int lane = 0; lane < kLanes<A>; ++lane) total += v[lane];
  return total;
}

template <typename A>
TITANIUM_INLINE void add_row(const A* z, int64_t n, A scale, bool moments, RowSums* row) {
  constexpr A kNone = -kInfinity<A>;
  Vector<A> most = splat(std::numeric_limits<A>::lowest());
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    const Vector<A> v = load_logits(z + i, n - i, scale, kNone);
    most = v > most ? v : most;
  }
  double max = row->max;
  for (int lane = 0; lane < kLanes<A>; ++lane) max = std::max<double>(max, most[lane]);
  const A top = static_cast<A>(max);

  Vector<A> sum = {}, weighted = {}, squares = {};
  for (int64_t i = 0; i < n; i += kLanes<A>) {
    Vector<A> d = load_logits(z + i, n - i, scale, kNone) - top;
    d = d < kLeast<A> ? splat(kLeast<A>) : d;
    const Vector<A> e = exponential<A>(d);
    sum += e;
    if (moments) {
      weighted += e * d;
      squares += e * e;
    }
  }
  const double drop = row->sum > 0 ? row->max - max : 0, shrink = std::exp(drop);
  row->weighted = shrink * (row->weighted + row->sum * drop) + sum_lanes<A>(weighted);
  row->squares = shrink * shrink * row->squares + sum_lanes<A>(squares);
  row->sum = shrink * row->sum + sum_lanes<A>(sum);
  row->max = max;
}

template <typename A>
TITANIUM_INLINE Vector<A> gradient(Vector<A> scaled, const RowGradient<A>& row) {
  Vector<A> d = scaled - row.lse;
  d = d < kLeast<A> ? splat(kLeast<A>) : d > static_cast<A>(0) ? Vector<A>{} : d;
  const Vector<A> p = exponential<A>(d);
  return p * (row.constant + row.by_logp * d + row.by_p * p);
}

template <typename A>
TITANIUM_INLINE void gradients(A* z, int64_t n, const RowGradient<A>& row) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>)
    store(z + i, gradient<A>(load(z + i) * row.inverse_temperature, row));
  if (i == n) return;
  const Vector<A> last = gradient<A>(load_logits(z + i, n - i, row.inverse_temperature, -kInfinity<A>), row);
  for (int64_t j = i; j < n; ++j) z[j] = last[j - i];
}

template <typename S>
TITANIUM_INLINE void narrow(const Wide<S>* from, int64_t n, int64_t padded, S* to) {
  int64_t i = 0;
  for (; i + kLanes<Wide<S>> <= n; i += kLanes<Wide<S>>) store_narrow(to + i, load(from + i));
  for (; i < n; ++i) to[i] = static_cast<S>(from[i]);
  for (; i < padded; ++i) to[i] = S(0);
}

}  // namespace

TITANIUM_CLONES void add_logits(const float* z, int64_t n, float scale, bool moments, RowSums* row) {
  add_row(z, n, scale, moments, row);
}
TITANIUM_CLONES void add_logits(const double* z, int64_t n, double scale, bool moments, RowSums* row) {
  add_row(z, n, scale, moments, row);
}
void add_sums(const RowSums& part, RowSums* row) {
  const double max = std::max(row->max, part.max);
  const double drop = row->sum > 0 ? row->max - max : 0, part_drop = part.sum > 0 ? part.max - max : 0;
  const double shrink = std::exp(drop), part_shrink = std::exp(part_drop);
  row->weighted =
      shrink * (row->weighted + row->sum * drop) + part_shrink * (part.weighted + part.sum * part_drop);
  row->squares = shrink * shrink * row->squares + part_shrink * part_shrink * part.squares;
  row->sum = shrink * row->sum + part_shrink * part.sum;
  row->target += part.target;
  row->max = max;
}
TITANIUM_CLONES void logit_gradients(float* z, int64_t n, const RowGradient<float>& row) {
  gradients(z, n, row);
}
TITANIUM_CLONES void logit_gradients(double* z, int64_t n, const RowGradient<double>& row) {
  gradients(z, n, row);
}
TITANIUM_CLONES void narrow_row(const float* from, int64_t n, int64_t padded, at::BFloat16* to) {
  narrow(from, n, padded, to);
}
TITANIUM_CLONES void narrow_row(const float* from, int64_t n, int64_t padded, float* to) {
  narrow(from, n, padded, to);
}
TITANIUM_CLONES void narrow_row(const double* from, int64_t n, int64_t padded, double* to) {
  narrow(from, n, padded, to);
}

}  // namespace titanium
