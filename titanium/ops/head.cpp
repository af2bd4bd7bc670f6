#include "titanium/ops/head.h"

#include <ATen/ATen.h>

#include <cmath>
#include <type_traits>

#include "titanium/ops/gemm.h"
#include "titanium/ops/graph.h"
#include "titanium/ops/head_rows.h"
#include "titanium/ops/linear_logprob.h"
#include "titanium/ops/products.h"

namespace titanium {
namespace {

constexpr int64_t kHeldLogits = int64_t{3} << 23;  // logits held at once at most
constexpr int64_t kWorthHolding = 512;  // rows; with fewer, visiting the weight and its sink again costs more
constexpr int64_t kGroup = 1024;        // rows of the weight visited at once; a multiple of kMaxRightColumns

template <typename S, typename P>
class Group {
 public:
  // Rows [first, first + count) of the weight, as columns of B where `with_columns`: for logits.
  Group(const at::Tensor& weight, int64_t first, bool with_columns = true)
      : first(first),
        count(std::min(kGroup, weight.size(0) - first)),
        part(weight.narrow(0, first, count)),
        columns(weight.size(1), count),
        width(columns.blocks * columns.block) {
    if (with_columns)
      for_blocks(columns.blocks, [&](int64_t n) { columns.fill_transposed(n, Rows<S>(part)); });
  }

  // tile [kLeftRows, width] = the logits of block m of the rows.
  void logits(const Left<P>& x, int64_t m, Wide<P>* tile, int64_t stride) const {
    for (int64_t n = 0; n < columns.blocks; ++n)
      multiply(x, m, columns, n, tile + n * columns.block, stride, false);
  }

  int64_t first, count;
  at::Tensor part;  // [count, D]
  Right<P> columns;
  int64_t width;  // count rounded up to blocks
};

// The logits of all rows, held from the forward to the backward.
template <typename A>
class HeldLogits {
 public:
  HeldLogits(int64_t R, int64_t V)
      : stride_(round_up(V, kMaxRightColumns)),
        storage_(
            at::empty({round_up(R, kLeftRows), stride_}, at::dtype(c10::CppTypeToScalarType<A>::value))) {}

  A* at(int64_t m, int64_t first) const {
    return storage_.mutable_data_ptr<A>() + m * kLeftRows * stride_ + first;
  }
  int64_t stride() const { return stride_; }

 private:
  int64_t stride_;
  at::Tensor storage_;
};

// for_blocks for tasks that need room for a tile of logits.
template <typename A, typename Task>
void for_tiles(int64_t count, const Task& task) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    const at::Tensor room = at::empty({kLeftRows * kGroup}, at::dtype(c10::CppTypeToScalarType<A>::value));
    for (int64_t i = begin; i < end; ++i) task(i, room.mutable_data_ptr<A>());
    release_tiles();
  });
}

// Where the vocabulary's first row lies, from the weight's.
int64_t begin_of(const VocabSlice* slice) {
  return slice == nullptr ? 0 : slice->begin;
}

// The sums of every rank's slice put together, in rank order, so that each rank gets the same bits.
void merge(const VocabSlice& slice, bool moments, std::vector<RowSums>* sums) {
  const int64_t R = static_cast<int64_t>(sums->size()), k = moments ? 5 : 3;
  const at::Tensor mine = at::empty({R, k}, at::kDouble);
  double* to = mine.mutable_data_ptr<double>();
  for (const RowSums& s : *sums) {
    const double all[] = {s.max, s.sum, s.target, s.weighted, s.squares};
    to = std::copy_n(all, k, to);
  }
  const at::Tensor parts = slice.gather(mine).contiguous();  // [ranks, R, k]
  const double* from = parts.const_data_ptr<double>();
  sums->assign(R, {});
  for (int64_t rank = 0; rank < parts.size(0); ++rank) {
    for (RowSums& s : *sums) {
      RowSums part{from[0], from[1], 0, 0, from[2]};
      if (moments) {
        part.weighted = from[3];
        part.squares = from[4];
      }
      add_sums(part, &s);
      from += k;
    }
  }
}

template <typename A>
const A* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<A>() : nullptr;
}

template <typename S, typename P>
HeadValues forward(const HeadTokens& rows, const at::Tensor& weight, bool moments,
                   const HeldLogits<Wide<P>>* held = nullptr) {
  using A = Wide<P>;
  const int64_t R = rows.x.size(0), V = weight.size(0);
  const Left<P> x{Rows<S>(rows.x)};
  const A* temperature = data_or_null<A>(rows.temperature);
  const int64_t* label = rows.labels.const_data_ptr<int64_t>();
  const int64_t begin = begin_of(rows.slice);
  std::vector<RowSums> sums(R);
  for (int64_t first = 0; first < V; first += kGroup) {
    const Group<S, P> group(weight, first);
    for_tiles<A>(x.blocks(), [&](int64_t m, A* room) {
      A* tile = held != nullptr ? held->at(m, first) : room;
      const int64_t stride = held != nullptr ? held->stride() : group.width;
      group.logits(x, m, tile, stride);
      for (int64_t i = 0; i < x.rows(m); ++i) {
        const int64_t r = m * kLeftRows + i, at = label[r] - begin - first;
        const A scale = temperature == nullptr ? A(1) : A(1) / temperature[r];
        const A* z = tile + i * stride;
        add_logits(z, group.count, scale, moments, &sums[r]);
        if (label[r] >= 0 && at >= 0 && at < group.count) sums[r].target = z[at] * scale;
      }
    });
  }
  if (rows.slice != nullptr) merge(*rows.slice, moments, &sums);

  const auto options = rows.x.options().dtype(statistics_dtype(rows.x.scalar_type()));
  HeadValues out{at::empty({R}, options), at::empty({R}, options), {}, {}};
  if (moments) {
    out.entropy = at::empty({R}, options);
    out.sum_pi_squared = at::empty({R}, options);
  }
  for (int64_t r = 0; r < R; ++r) {
    const RowSums& s = sums[r];
    const double lse = s.max + std::log(s.sum);
    out.lse.mutable_data_ptr<A>()[r] = static_cast<A>(lse);
    out.logprob.mutable_data_ptr<A>()[r] = label[r] < 0 ? A(0) : static_cast<A>(s.target - lse);
    if (!moments) continue;
    out.entropy.mutable_data_ptr<A>()[r] = static_cast<A>(std::log(s.sum) - s.weighted / s.sum);
    out.sum_pi_squared.mutable_data_ptr<A>()[r] = static_cast<A>(s.squares / (s.sum * s.sum));
  }
  return out;
}

// The gradient by a row's logits z, of which p = softmax(z / T), is by the chain rule
//   1/T p_v (-gl - ge (log p_v + H) + 2 gq (p_v - Q)) + 1/T gl [v = label],
// gl, ge, gq the gradients by log p(label), entropy H and sum of squares Q.
template <typename A>
struct RowCoefficients {
  std::vector<RowGradient<A>> rows;
  std::vector<A> at_label;

  RowCoefficients(const HeadTokens& head, const HeadValues& values, const HeadGradients& g)
      : rows(head.x.size(0)), at_label(head.x.size(0)) {
    const A *temperature = data_or_null<A>(head.temperature), *lse = values.lse.const_data_ptr<A>();
    const A *gl = data_or_null<A>(g.logprob), *ge = data_or_null<A>(g.entropy),
            *gq = data_or_null<A>(g.sum_pi_squared);
    const A *H = data_or_null<A>(values.entropy), *Q = data_or_null<A>(values.sum_pi_squared);
    const int64_t* label = head.labels.const_data_ptr<int64_t>();
    for (size_t r = 0; r < rows.size(); ++r) {
      const A scale = temperature == nullptr ? A(1) : A(1) / temperature[r];
      const A by_label = gl == nullptr || label[r] < 0 ? A(0) : gl[r];
      RowGradient<A> row{scale, lse[r], -scale * by_label, 0, 0};
      if (ge != nullptr) {
        row.constant -= scale * ge[r] * H[r];
        row.by_logp = -scale * ge[r];
      }
      if (gq != nullptr) {
        row.constant -= 2 * scale * gq[r] * Q[r];
        row.by_p = 2 * scale * gq[r];
      }
      rows[r] = row;
      at_label[r] = scale * by_label;
    }
  }
};

// One backward pass, run when the sink is at hand or else without it.
template <typename S, typename P>
class Backward {
 public:
  using A = Wide<P>;

  Backward(const HeadTokens& rows, const HeadValues& values, const HeadGradients& gradients)
      : rows_(rows), coefficients_(rows, values, gradients) {}

  void receive(const at::Tensor& sink) {
    require(sink.dim() == 2 && sink.stride(1) == 1, "head", "the sink is [V, D] by rows", sink, {});
    if (weight.defined()) {
      run(sink, false);
    } else {
      add_kept(sink);
    }
  }

  // Forms dx and the gradient by the logits of each group, which goes to the sink, or is kept for later, or
  // neither.
  void run(const at::Tensor& sink, bool keep) {
    const int64_t R = rows_.x.size(0), D = rows_.x.size(1), V = weight.size(0), padded = round_up(R, 16);
    const Left<P> x{Rows<S>(rows_.x)};
    std::unique_ptr<Right<P>> x_rows = sink.defined() ? packed_x() : nullptr;
    at::Tensor sums;  // [padded, D rounded up]
    for (int64_t first = 0; first < V; first += kGroup) {
      const Group<S, P> group(weight, first, held == nullptr);
      Right<P> w_rows(group.count, D);
      for_blocks(w_rows.blocks, [&](int64_t n) { w_rows.fill(n, Rows<S>(group.part)); });
      const int64_t width = w_rows.blocks * w_rows.block;
      if (!sums.defined()) sums = at::empty({padded, width}, at::dtype(c10::CppTypeToScalarType<A>::value));
      A* dx = sums.mutable_data_ptr<A>();
      const at::Tensor dz = at::empty({padded, w_rows.depth}, at::dtype(c10::CppTypeToScalarType<P>::value));
      P* to = dz.mutable_data_ptr<P>();
      const Left<P> left{Rows<P>(to, padded, w_rows.depth, w_rows.depth)};
      for_tiles<A>(x.blocks(), [&](int64_t m, A* room) {
        A* tile = held != nullptr ? held->at(m, first) : room;
        const int64_t stride = held != nullptr ? held->stride() : group.width;
        if (held == nullptr) group.logits(x, m, tile, stride);
        form(group, m, x.rows(m), tile, stride, to, w_rows.depth);
        for (int64_t r = m * kLeftRows + x.rows(m); r < m * kLeftRows + x.padded_rows(m); ++r)
          std::fill_n(to + r * w_rows.depth, w_rows.depth, P(0));
        for (int64_t n = 0; n < w_rows.blocks; ++n)
          multiply(left, m, w_rows, n, dx + m * kLeftRows * width + n * w_rows.block, width, first > 0);
      });
      if (sink.defined()) add(dz, first, group.count, *x_rows, sink);
      if (keep) kept_.push_back(dz);
    }
    finish(sums);
    if (!keep) rows_ = {};
  }

  at::Tensor weight;                    // while it is valid
  const HeldLogits<A>* held = nullptr;  // if the forward held them; run() overwrites them
  at::Tensor dx;                        // [R, D], in the statistics' dtype

 private:
  void add_kept(const at::Tensor& sink) {
    const std::unique_ptr<Right<P>> x_rows = packed_x();
    for (size_t i = 0; i < kept_.size(); ++i) {
      const int64_t first = static_cast<int64_t>(i) * kGroup;
      add(kept_[i], first, std::min(kGroup, sink.size(0) - first), *x_rows, sink);
    }
    kept_.clear();
  }

  std::unique_ptr<Right<P>> packed_x() const {
    auto right = std::make_unique<Right<P>>(rows_.x.size(0), rows_.x.size(1));
    for_blocks(right->blocks, [&](int64_t n) { right->fill(n, Rows<S>(rows_.x)); });
    return right;
  }

  void form(const Group<S, P>& group, int64_t m, int64_t count, A* tile, int64_t tile_stride, P* to,
            int64_t stride) const {
    const int64_t* label = rows_.labels.const_data_ptr<int64_t>();
    const int64_t begin = begin_of(rows_.slice) + group.first;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = m * kLeftRows + i, at = label[r] - begin;
      A* z = tile + i * tile_stride;
      logit_gradients(z, group.count, coefficients_.rows[r]);
      if (label[r] >= 0 && at >= 0 && at < group.count) z[at] += coefficients_.at_label[r];
      narrow_row(z, group.count, stride, to + r * stride);
    }
  }

  // sink [first, first + count) += dz^T x.
  static void add(const at::Tensor& dz, int64_t first, int64_t count, const Right<P>& x_rows,
                  const at::Tensor& sink) {
    Left<P> left(x_rows.K, count);
    for_blocks(left.blocks(), [&](int64_t m) {
      left.fill_transposed(m, Rows<P>(dz.const_data_ptr<P>(), x_rows.K, count, dz.stride(0)));
    });
    add_product(left, x_rows, sink.mutable_data_ptr<A>() + first * sink.stride(0), sink.stride(0));
  }

  void finish(const at::Tensor& sums) {
    dx = sums.narrow(0, 0, rows_.x.size(0)).narrow(1, 0, rows_.x.size(1));
  }

  HeadTokens rows_;
  RowCoefficients<A> coefficients_;
  std::vector<at::Tensor> kept_;  // of each group, [R rounded up, count rounded up]
};

template <typename S, typename P>
at::Tensor backward(const HeadTokens& rows, const Handle& weight, const HeadValues& values,
                    const HeadGradients& gradients, const HeldLogits<Wide<P>>* held = nullptr) {
  const auto pass = std::make_shared<Backward<S, P>>(rows, values, gradients);
  pass->held = held;
  pass->weight = by_rows(weight.value());
  weight.accumulate([pass](const at::Tensor& sink) { pass->receive(sink); });
  if (!pass->dx.defined()) pass->run({}, weight.trainable());
  pass->weight.reset();  // a deferred gradient must not hold it
  return pass->dx;
}

// Forward and backward by chunks of rows whose logits are held in between.
template <typename S, typename P>
at::Tensor nll_of_chunks(const HeadTokens& rows, const Handle& weight, const at::Tensor& weights,
                         int64_t step, HeadValues* values) {
  using A = Wide<P>;
  const at::Tensor w = by_rows(weight.value());
  const int64_t R = rows.x.size(0);
  const HeldLogits<A> held(std::min(R, step), w.size(0));
  std::vector<at::Tensor> dx, lse, logprob;
  for (int64_t r = 0; r < R || r == 0; r += step) {
    const int64_t n = std::min(step, R - r);
    const auto part = [&](const at::Tensor& t) { return t.defined() ? t.narrow(0, r, n) : t; };
    const HeadTokens chunk{part(rows.x), part(rows.labels), part(rows.temperature), rows.slice};
    const HeadValues out = forward<S, P>(chunk, w, false, &held);
    dx.push_back(backward<S, P>(chunk, weight, out, {-part(weights), {}, {}}, &held));
    lse.push_back(out.lse);
    logprob.push_back(out.logprob);
  }
  *values = {at::cat(lse), at::cat(logprob), {}, {}};
  return at::cat(dx);
}

at::Tensor local_logits(const at::Tensor& x, const at::Tensor& weight) {
  if (x.scalar_type() != at::kBFloat16) return at::mm(x, weight.t());
  const at::Tensor w = by_rows(weight), from = by_rows(x);
  const int64_t V = w.size(0);
  const at::Tensor out = at::empty({x.size(0), V}, at::dtype(at::kFloat));
  float* to = out.mutable_data_ptr<float>();
  for_block_type(at::kBFloat16, [&](auto stored, auto block) {
    using S = decltype(stored);
    using P = decltype(block);
    if constexpr (std::is_same_v<Wide<P>, float>) {
      const Left<P> left{Rows<S>(from)};
      for (int64_t first = 0; first < V; first += kGroup) {
        const Group<S, P> group(w, first);
        for_tiles<float>(left.blocks(), [&](int64_t m, float* tile) {
          group.logits(left, m, tile, group.width);
          for (int64_t i = 0; i < left.rows(m); ++i)
            std::copy_n(tile + i * group.width, group.count, to + (m * kLeftRows + i) * V + first);
        });
      }
    }
  });
  return out;
}

// Rows whose logits head_nll holds at once; 0 where forming them again is better.
int64_t chunk_rows(int64_t R, int64_t V, bool bf16_blocks) {
  const int64_t step = kHeldLogits / V / kLeftRows * kLeftRows;
  // Matrix units form the logits again in less time than memory takes to hold them.
  const bool again = bf16_blocks && has_amx();
  return again || step < std::clamp(R, kLeftRows, kWorthHolding) ? 0 : step;
}
template <typename P>
int64_t chunk_rows(const HeadTokens& rows, int64_t V) {
  const int64_t step = chunk_rows(rows.x.size(0), V, std::is_same_v<P, at::BFloat16>);
  if (rows.slice == nullptr) return step;
  // A chunk takes a gather, so ranks whose slices or CPUs differ take the least that any of them wants.
  const at::Tensor all = rows.slice->gather(at::full({1}, step, at::kLong));
  return all.min().item<int64_t>();
}

}  // namespace

float logprob_of_row(const float* logits, int64_t V, int64_t label, float temperature) {
  RowSums sums;
  const float scale = 1 / temperature;
  for (int64_t first = 0; first < V; first += kGroup)
    add_logits(logits + first, std::min(kGroup, V - first), scale, false, &sums);
  const float target = logits[label] * scale;
  return static_cast<float>(target - (sums.max + std::log(sums.sum)));
}

HeadValues head_forward(const HeadTokens& rows, const at::Tensor& weight, bool moments) {
  const at::Tensor w = by_rows(weight);
  HeadValues out;
  for_block_type(rows.x.scalar_type(), [&](auto stored, auto block) {
    out = forward<decltype(stored), decltype(block)>(rows, w, moments);
  });
  return out;
}

at::Tensor head_backward(const HeadTokens& rows, const Handle& weight, const HeadValues& values,
                         const HeadGradients& gradients) {
  at::Tensor dx;
  for_block_type(rows.x.scalar_type(), [&](auto stored, auto block) {
    dx = backward<decltype(stored), decltype(block)>(rows, weight, values, gradients);
  });
  return dx;
}

at::Tensor head_nll(const HeadTokens& rows, const Handle& weight, const at::Tensor& weights,
                    HeadValues* values) {
  at::Tensor dx;
  for_block_type(rows.x.scalar_type(), [&](auto stored, auto block) {
    using S = decltype(stored);
    using P = decltype(block);
    const at::Tensor w = by_rows(weight.value());
    const int64_t step = chunk_rows<P>(rows, w.size(0));
    if (step == 0) {
      *values = forward<S, P>(rows, w, false);
      dx = backward<S, P>(rows, weight, *values, {-weights, {}, {}});
    } else {
      dx = nll_of_chunks<S, P>(rows, weight, weights, step, values);
    }
  });
  return dx;
}

int64_t head_nll_work(int64_t R, int64_t D, int64_t V, int64_t element) {
  const int64_t p = block_element(element), wide = std::max<int64_t>(element, 4), group = std::min(kGroup, V);
  const int64_t step = chunk_rows(R, V, p == 2), rows = step == 0 ? R : std::min(R, step);
  const int64_t held = step == 0 ? 0 : round_up(rows, kLeftRows) * round_up(V, kMaxRightColumns) * wide;
  // x by rows and, where the type differs, by columns; dx of the chunks, which are then put together.
  const int64_t of_rows = rows * D * (p == element ? p : 2 * p) + (rows < R ? R * D * wide : 0);
  // Of the group in turn: the weight by rows and by columns, the gradient by logits as it is and packed.
  return held + of_rows + 2 * group * D * p + 2 * rows * group * p;
}

at::Tensor head_logits(const at::Tensor& x, const at::Tensor& weight, const PackedWeight* packed,
                       const VocabSlice* slice) {
  const at::Tensor mine = packed != nullptr ? wide_times_transposed(x, *packed) : local_logits(x, weight);
  if (slice == nullptr) return mine;
  const at::Tensor counts = slice->gather(at::full({1}, mine.size(1), at::kLong)).flatten();
  const at::Tensor padded = at::constant_pad_nd(mine, {0, counts.max().item<int64_t>() - mine.size(1)});
  const at::Tensor parts = slice->gather(padded);  // [ranks, T, V of the largest slice]
  std::vector<at::Tensor> out;
  for (int64_t rank = 0; rank < parts.size(0); ++rank)
    out.push_back(parts[rank].narrow(1, 0, counts[rank].item<int64_t>()));
  return at::cat(out, 1);
}

}  // namespace titanium
