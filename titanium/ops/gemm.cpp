#include "titanium/ops/gemm.h"

#include <ATen/ATen.h>
#include <ATen/native/CPUBlas.h>

#include <type_traits>

#include "titanium/ops/graph.h"
#include "titanium/ops/tile_pack.h"

namespace titanium {
namespace {

constexpr int64_t kFillRows = 64;  // rows of B packed at once

int64_t block_width(int64_t N) {
  for (const int64_t width : {128, 96, 64})
    if (N % width == 0) return width;
  return N > 128 ? 128 : round_up(N, 32);
}

// Rows [first, first + n) and columns [column, column + width) of a matrix as pointers to P: to the matrix
// itself, or, where the type differs or the edge is crossed, to a copy with zeros beyond the edge.
template <typename P>
class Window {
 public:
  template <typename S>
  const P* const* read(const Rows<S>& from, int64_t first, int64_t n, int64_t column, int64_t width) {
    pointers_.resize(n);
    const int64_t rows = std::clamp<int64_t>(from.count - first, 0, n);
    const int64_t columns = std::clamp<int64_t>(from.width - column, 0, width);
    if constexpr (std::is_same_v<S, P>) {
      if (rows == n && columns == width) {
        for (int64_t i = 0; i < n; ++i) pointers_[i] = from.data + (first + i) * from.stride + column;
        return pointers_.data();
      }
    }
    copy_.assign(n * width, P(0));
    for (int64_t i = 0; i < n; ++i) {
      pointers_[i] = copy_.data() + i * width;
      if (i >= rows) continue;
      const S* row = from.data + (first + i) * from.stride + column;
      for (int64_t j = 0; j < columns; ++j) copy_[i * width + j] = static_cast<P>(row[j]);
    }
    return pointers_.data();
  }

 private:
  std::vector<const P*> pointers_;
  std::vector<P> copy_;
};

// C [m, n] (+)= A [m, k] B, k ascending.
template <typename A>
TITANIUM_INLINE void plain(int64_t m, int64_t n, int64_t k, const A* a, int64_t lda, const A* b, A* c,
                           int64_t ldc, bool add) {
  for (int64_t i = 0; i < m; ++i) {
    A* to = c + i * ldc;
    if (!add)
      for (int64_t j = 0; j < n; ++j) to[j] = 0;
    for (int64_t l = 0; l < k; ++l) {
      const A left = a[i * lda + l];
      for (int64_t j = 0; j < n; ++j) to[j] += left * b[l * n + j];
    }
  }
}
TITANIUM_CLONES void loops(int64_t m, int64_t n, int64_t k, const double* a, int64_t lda, const double* b,
                           double* c, int64_t ldc, bool add) {
  plain(m, n, k, a, lda, b, c, ldc, add);
}
TITANIUM_CLONES void loops(int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
                           float* c, int64_t ldc, bool add) {
  plain(m, n, k, a, lda, b, c, ldc, add);
}
void loops(int64_t, int64_t, int64_t, const at::BFloat16*, int64_t, const at::BFloat16*, float*, int64_t,
           bool) {
  throw Bug(
      "blocks of bf16 need a CPU with bf16 products");  // for_block_type widens them where there are none
}

template <typename P>
bool has_brgemm() {
  if constexpr (std::is_same_v<P, float>) return has_fp32_tiles();
  return std::is_same_v<P, at::BFloat16>;
}

template <typename P>
at::Tensor room(int64_t n) {
  return at::empty({n}, at::dtype(c10::CppTypeToScalarType<P>::value));
}

}  // namespace

at::Tensor by_rows(const at::Tensor& x) {
  return x.stride(-1) == 1 && x.stride(0) >= x.size(-1) ? x : x.contiguous();
}

template <typename P>
Right<P>::Right(int64_t K, int64_t N)
    : K(K),
      N(N),
      block(block_width(N)),
      blocks((N + block - 1) / block),
      depth(round_up(K, 32)),
      storage_(room<P>(blocks * block * depth)),
      data_(storage_.template mutable_data_ptr<P>()) {}

template <typename P>
template <typename S>
void Right<P>::fill(int64_t n, const Rows<S>& b) {
  Window<P> window;
  for (int64_t k = 0; k < depth; k += kFillRows) {
    const int64_t rows = std::min(kFillRows, depth - k);
    pack_rows(rows, block, window.read(b, k, rows, n * block, block), data_ + (n * depth + k) * block);
  }
}

template <typename P>
template <typename S>
void Right<P>::fill_transposed(int64_t n, const Rows<S>& b) {
  Window<P> window;
  for (int64_t k = 0; k < depth; k += kBlockDepth) {
    const int64_t columns = std::min(kBlockDepth, depth - k);
    pack_columns(block, columns, window.read(b, n * block, block, k, columns),
                 data_ + (n * depth + k) * block);
  }
}

template <typename P>
template <typename S>
Left<P>::Left(const Rows<S>& a) : K(a.width), M(a.count), depth(a.width) {
  const int64_t whole = M % 16 == 0 ? blocks() : blocks() - 1;
  if constexpr (std::is_same_v<S, P>) {
    if (K % kPair<P> == 0) {
      in_place_ = a.data;
      stride_ = a.stride;
    }
  }
  if (in_place_ == nullptr) depth = round_up(K, 32);
  if (in_place_ != nullptr && whole == blocks()) return;
  // Copies the rows, by blocks of K, zeros beyond the edges: all of them, or the block at the end.
  const int64_t first = in_place_ != nullptr ? whole : 0, padded = round_up(M - first * kLeftRows, 16);
  packed_rows_ = padded;
  storage_ = room<P>(padded * depth);
  packed_ = storage_.template mutable_data_ptr<P>();
  for (int64_t k = 0; k < depth; k += kBlockDepth) {
    const int64_t width = std::min(kBlockDepth, depth - k);
    at::parallel_for(0, padded / 16, 4, [&](int64_t begin, int64_t end) {
      Window<P> window;
      for (int64_t i = begin; i < end; ++i) {
        const P* const* rows = window.read(a, first * kLeftRows + i * 16, 16, k, width);
        for (int64_t r = 0; r < 16; ++r)
          std::memcpy(packed_ + k * padded + (i * 16 + r) * width, rows[r], width * sizeof(P));
      }
    });
  }
}

template <typename P>
Left<P>::Left(int64_t K, int64_t M)
    : K(K), M(M), depth(round_up(K, 32)), packed_rows_(round_up(M, kLeftRows)) {
  storage_ = room<P>(packed_rows_ * depth);
  packed_ = storage_.template mutable_data_ptr<P>();
}

template <typename P>
template <typename S>
void Left<P>::fill_transposed(int64_t m, const Rows<S>& a) {
  Window<P> window;
  for (int64_t k = 0; k < depth; k += kBlockDepth) {
    const int64_t width = std::min(kBlockDepth, depth - k);
    pack_transposed(width, kLeftRows, window.read(a, k, width, m * kLeftRows, kLeftRows),
                    packed_ + k * packed_rows_ + m * kLeftRows * width);
  }
}

template <typename P>
const P* Left<P>::at(int64_t m, int64_t k, int64_t* stride) const {
  const bool here = packed_ == nullptr || (in_place_ != nullptr && m + 1 < blocks());
  if (here) {
    *stride = stride_;
    return in_place_ + m * kLeftRows * stride_ + k;
  }
  *stride = std::min(kBlockDepth, depth - k);
  const int64_t first = in_place_ != nullptr ? blocks() - 1 : 0;
  return packed_ + k * packed_rows_ + (m - first) * kLeftRows * *stride;
}

template <typename P>
void multiply(const Left<P>& left, int64_t m, const Right<P>& right, int64_t n, Wide<P>* c, int64_t stride,
              bool add) {
  for (int64_t k = 0; k < left.depth; k += kBlockDepth) {
    const int64_t width = std::min(kBlockDepth, left.depth - k);
    int64_t lda = 0;
    const P* a = left.at(m, k, &lda);
    if (!has_brgemm<P>()) {
      loops(left.padded_rows(m), right.block, width, a, lda, right.at(n, k), c, stride, add || k > 0);
    } else if constexpr (!std::is_same_v<P, double>) {
      at::native::cpublas::brgemm(left.padded_rows(m), right.block, width, lda, right.block, stride,
                                  add || k > 0, a, right.at(n, k), c, kPair<P> == 2);
    }
  }
}

template <typename P>
void add_product(const Left<P>& left, const Right<P>& right, Wide<P>* to, int64_t stride) {
  if (left.depth == 0) return;
  for_block_pairs(left, right, [&](int64_t m, int64_t n) {
    Wide<P>* c = to + m * kLeftRows * stride + n * right.block;
    if (left.rows(m) == left.padded_rows(m) && right.columns(n) == right.block) {
      multiply(left, m, right, n, c, stride, true);
      return;
    }
    alignas(64) Wide<P> tile[kLeftRows * kMaxRightColumns];
    multiply(left, m, right, n, tile, right.block, false);
    for (int64_t r = 0; r < left.rows(m); ++r)
      for (int64_t j = 0; j < right.columns(n); ++j) c[r * stride + j] += tile[r * right.block + j];
  });
}

#define TITANIUM_INSTANTIATE(P, S)                                 \
  template Left<P>::Left(const Rows<S>&);                          \
  template void Left<P>::fill_transposed(int64_t, const Rows<S>&); \
  template void Right<P>::fill(int64_t, const Rows<S>&);           \
  template void Right<P>::fill_transposed(int64_t, const Rows<S>&);
#define TITANIUM_INSTANTIATE_BLOCKS(P)                                                                \
  template class Left<P>;                                                                             \
  template class Right<P>;                                                                            \
  template void multiply(const Left<P>&, int64_t, const Right<P>&, int64_t, Wide<P>*, int64_t, bool); \
  template void add_product(const Left<P>&, const Right<P>&, Wide<P>*, int64_t);
TITANIUM_INSTANTIATE_BLOCKS(at::BFloat16)
TITANIUM_INSTANTIATE_BLOCKS(float)
TITANIUM_INSTANTIATE_BLOCKS(double)
TITANIUM_INSTANTIATE(at::BFloat16, at::BFloat16)
TITANIUM_INSTANTIATE(float, at::BFloat16)
TITANIUM_INSTANTIATE(float, float)
TITANIUM_INSTANTIATE(double, double)

}  // namespace titanium
