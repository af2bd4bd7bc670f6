#include "titanium/ops/products.h"

#include <ATen/ATen.h>

#include "titanium/ops/gemm.h"
#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"

namespace titanium {
namespace {

constexpr int64_t kGrain = 16;  // rows a thread takes at least

// out [width] = sums (+ bias) (+ residual), each rounded once.
template <typename S>
TITANIUM_INLINE void finish_rows(int64_t rows, int64_t width, const float* sums, int64_t stride,
                                 const S* bias, const S* residual, int64_t residual_stride, S* out,
                                 int64_t out_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* from = sums + r * stride;
    const S* more = residual == nullptr ? nullptr : residual + r * residual_stride;
    S* to = out + r * out_stride;
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) {
      Vector<float> v = load(from + i);
      if (bias != nullptr) v += load_wide(bias + i);
      if (more != nullptr) v += load_wide(more + i);
      store_narrow(to + i, v);
    }
    for (; i < width; ++i) {
      float v = from[i];
      if (bias != nullptr) v += static_cast<float>(bias[i]);
      if (more != nullptr) v += static_cast<float>(more[i]);
      to[i] = static_cast<S>(v);
    }
  }
}
TITANIUM_CLONES void finish(int64_t rows, int64_t width, const float* sums, int64_t stride,
                            const at::BFloat16* bias, const at::BFloat16* residual, int64_t residual_stride,
                            at::BFloat16* out, int64_t out_stride) {
  finish_rows(rows, width, sums, stride, bias, residual, residual_stride, out, out_stride);
}

using Half = at::BFloat16;

const Half* half_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr<Half>() : nullptr;
}

template <typename P>
at::Tensor finish_product(const Left<P>& left, const Right<P>& right, const at::Tensor& bias,
                          const at::Tensor& residual) {
  const at::Tensor out = at::empty({left.M, right.N}, at::dtype(at::kBFloat16));
  Half* to = out.mutable_data_ptr<Half>();
  const Half *b = half_data(bias), *r = half_data(residual);
  const int64_t r_stride = residual.defined() ? residual.stride(0) : 0;
  for_block_pairs(left, right, [&](int64_t m, int64_t n) {
    alignas(64) float tile[kLeftRows * kMaxRightColumns];
    const int64_t row = m * kLeftRows, column = n * right.block;
    multiply(left, m, right, n, tile, right.block, false);
    finish(left.rows(m), right.columns(n), tile, right.block, b == nullptr ? b : b + column,
           r == nullptr ? r : r + row * r_stride + column, r_stride, to + row * right.N + column, right.N);
  });
  return out;
}

template <typename P>
at::Tensor wide_product(const Left<P>& left, const Right<P>& right) {
  const at::Tensor out = at::zeros({left.M, right.N}, at::dtype(at::kFloat));
  add_product(left, right, out.mutable_data_ptr<float>(), right.N);
  return out;
}

// Runs run(P{}) with what blocks of bf16 hold here.
template <typename Run>
auto with_blocks(const Run& run) {
  return has_bf16_tiles() ? run(Half()) : run(float());
}

// run(a, b^T) and run(a, b) of bf16, in blocks.
template <typename Run>
at::Tensor product_transposed(const at::Tensor& a, const at::Tensor& b, const Run& run) {
  return with_blocks([&](auto zero) {
    using P = decltype(zero);
    const Left<P> left{Rows<Half>(a)};
    Right<P> right(b.size(1), b.size(0));
    for_blocks(right.blocks, [&](int64_t n) { right.fill_transposed(n, Rows<Half>(b)); });
    return run(left, right);
  });
}
template <typename Run>
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const Run& run) {
  return with_blocks([&](auto zero) {
    using P = decltype(zero);
    const Left<P> left{Rows<Half>(a)};
    Right<P> right(b.size(0), b.size(1));
    for_blocks(right.blocks, [&](int64_t n) { right.fill(n, Rows<Half>(b)); });
    return run(left, right);
  });
}

// run(x, right) of bf16, in the blocks that right has.
template <typename Run>
at::Tensor with_left(const at::Tensor& x, const std::variant<Right<Half>, Right<float>>& blocks,
                     const Run& run) {
  const at::Tensor a = by_rows(x);
  return std::visit(
      [&]<typename P>(const Right<P>& right) {
        require(a.dim() == 2 && a.size(1) == right.K && a.scalar_type() == at::kBFloat16, "PackedWeight",
                "x is [T, I] in bf16, as wide as w", a, {});
        return run(Left<P>(Rows<Half>(a)), right);
      },
      blocks);
}

// A Right of w^T, every block filled.
template <typename P>
Right<P> pack_transposed_weight(const at::Tensor& w) {
  Right<P> right(w.size(1), w.size(0));
  for_blocks(right.blocks, [&](int64_t n) { right.fill_transposed(n, Rows<Half>(w)); });
  return right;
}

std::variant<Right<Half>, Right<float>> pack_weight(const at::Tensor& w) {
  require(w.dim() == 2 && w.scalar_type() == at::kBFloat16, "PackedWeight", "w is [O, I] in bf16", w, {});
  if (has_bf16_tiles()) return pack_transposed_weight<Half>(by_rows(w));
  return pack_transposed_weight<float>(by_rows(w));
}

}  // namespace

PackedWeight::PackedWeight(const at::Tensor& w) : blocks_(pack_weight(w)) {}

at::Tensor times_transposed(const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                            const at::Tensor& residual) {
  if (x.scalar_type() != at::kBFloat16) {
    const at::Tensor dense = x.contiguous();  // MKL's order of a sum depends on how a matrix lies
    at::Tensor start = residual.defined() && bias.defined() ? residual + bias
                       : residual.defined()                 ? residual
                                                            : bias;
    return start.defined() ? at::addmm(start, dense, w.t()) : at::mm(dense, w.t());
  }
  const at::Tensor a = by_rows(x), b = by_rows(w), more = residual.defined() ? by_rows(residual) : residual;
  const at::Tensor offset = bias.defined() ? bias.contiguous() : bias;
  return product_transposed(
      a, b, [&](const auto& left, const auto& right) { return finish_product(left, right, offset, more); });
}

at::Tensor times_transposed(const at::Tensor& x, const PackedWeight& w, const at::Tensor& bias,
                            const at::Tensor& residual) {
  const at::Tensor more = residual.defined() ? by_rows(residual) : residual;
  return with_left(x, w.blocks_, [&](const auto& left, const auto& right) {
    return finish_product(left, right, bias.defined() ? bias.contiguous() : bias, more);
  });
}

at::Tensor wide_times_transposed(const at::Tensor& x, const PackedWeight& w) {
  return with_left(x, w.blocks_,
                   [](const auto& left, const auto& right) { return wide_product(left, right); });
}

at::Tensor times(const at::Tensor& g, const at::Tensor& w) {
  if (g.scalar_type() != at::kBFloat16) return at::mm(g.contiguous(), w);
  return product(by_rows(g), by_rows(w),
                 [](const auto& left, const auto& right) { return finish_product(left, right, {}, {}); });
}

at::Tensor wide_times_transposed(const at::Tensor& x, const at::Tensor& w) {
  if (x.scalar_type() != at::kBFloat16) return at::mm(x.contiguous(), w.t());
  return product_transposed(by_rows(x), by_rows(w),
                            [](const auto& left, const auto& right) { return wide_product(left, right); });
}

at::Tensor wide_times(const at::Tensor& g, const at::Tensor& w) {
  if (g.scalar_type() != at::kBFloat16) return at::mm(g.contiguous(), w);
  return product(by_rows(g), by_rows(w),
                 [](const auto& left, const auto& right) { return wide_product(left, right); });
}

at::Tensor round_sum(const at::Tensor& sum, at::ScalarType dtype, const at::Tensor& bias,
                     const at::Tensor& residual) {
  if (dtype != at::kBFloat16) {
    at::Tensor out = sum;
    if (residual.defined()) out = out + residual;
    return bias.defined() ? out + bias : out;
  }
  const at::Tensor from = by_rows(sum), more = residual.defined() ? by_rows(residual) : residual;
  const at::Tensor offset = bias.defined() ? bias.contiguous() : bias;
  const int64_t T = from.size(0), O = from.size(1), stride = more.defined() ? more.stride(0) : 0;
  const at::Tensor out = at::empty({T, O}, at::dtype(at::kBFloat16));
  const float* sums = from.const_data_ptr<float>();
  const Half *b = half_data(offset), *r = half_data(more);
  Half* to = out.mutable_data_ptr<Half>();
  at::parallel_for(0, T, kGrain, [&](int64_t begin, int64_t end) {
    finish(end - begin, O, sums + begin * from.stride(0), from.stride(0), b,
           r == nullptr ? r : r + begin * stride, stride, to + begin * O, O);
  });
  return out;
}

LinearWork linear_work(int64_t T, int64_t O, int64_t I, int64_t element) {
  const int64_t p = block_element(element), weight_gradient = T * (O + I) * p;
  if (element > 2) return {0, weight_gradient};   // the other two products are ATen's
  const int64_t rows = p == element ? 0 : T * p;  // read where they lie, unless the type differs
  return {O * I * p + rows * I, std::max(O * I * p + rows * O, weight_gradient)};
}

void add_outer(const at::Tensor& sink, const at::Tensor& a, const at::Tensor& b) {
  require(a.dim() == 2 && b.dim() == 2 && a.size(0) == b.size(0) && a.scalar_type() == b.scalar_type(),
          "add_outer", "a is [T, M], b is [T, N], of one dtype", a, b);
  require(sink.dim() == 2 && sink.size(0) == a.size(1) && sink.size(1) == b.size(1) && sink.stride(1) == 1 &&
              sink.scalar_type() == statistics_dtype(a.scalar_type()),
          "add_outer", "the sink is [M, N] by rows, in fp32 (fp64 for fp64)", sink, a);
  // Not by MKL, whose order of summation depends on the number of threads.
  const at::Tensor by_a = by_rows(a), by_b = by_rows(b);
  for_block_type(a.scalar_type(), [&](auto stored, auto block) {
    using S = decltype(stored);
    using P = decltype(block);
    Left<P> left(by_a.size(0), by_a.size(1));
    Right<P> right(by_b.size(0), by_b.size(1));
    for_blocks(left.blocks() + right.blocks, [&](int64_t i) {
      if (i < left.blocks()) {
        left.fill_transposed(i, Rows<S>(by_a));
      } else {
        right.fill(i - left.blocks(), Rows<S>(by_b));
      }
    });
    add_product(left, right, sink.mutable_data_ptr<Wide<P>>(), sink.stride(0));
  });
}

}  // namespace titanium
