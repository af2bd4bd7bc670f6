// Matrix products by blocks: what linear.h and the head are built of.  C [M, N] = A [M, K] B [K, N], summed
// in Wide<P>. P is what the blocks hold: bf16 where the CPU multiplies it, fp32 in its place where it does
// not; fp32; fp64. Each element is summed over K in an order that depends on K alone, so neither neighbours
// nor threads change a bit.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/ops/tile_gemm.h"

namespace titanium {

constexpr int64_t kLeftRows = 64;  // rows of A in a block
constexpr int64_t kMaxRightColumns = 128;
constexpr int64_t kHeldBytes = int64_t{1} << 20;  // of B, used again and again
constexpr int64_t kBlockDepth = 512;              // of K, summed by one call

inline int64_t round_up(int64_t n, int64_t to) {
  return (n + to - 1) / to * to;
}

// A matrix that lies by rows.
template <typename S>
struct Rows {
  Rows(const S* data, int64_t count, int64_t width, int64_t stride)
      : data(data), count(count), width(width), stride(stride) {}
  explicit Rows(const at::Tensor& tensor)  // [count, width], the last stride 1
      : Rows(tensor.const_data_ptr<S>(), tensor.size(0), tensor.size(1), tensor.stride(0)) {}
  Rows slice(int64_t first, int64_t n) const { return {data + first * stride, n, width, stride}; }

  const S* data;
  int64_t count, width, stride;
};

// B, in `blocks` blocks of `block` columns (a multiple of 32).  Each block is filled on its own, by any
// thread.
template <typename P>
class Right {
 public:
  Right(int64_t K, int64_t N);

  template <typename S>
  void fill(int64_t n, const Rows<S>& b);  // b [K, N]
  template <typename S>
  void fill_transposed(int64_t n, const Rows<S>& b);  // b [N, K]

  int64_t columns(int64_t n) const { return std::min(block, N - n * block); }  // without the padding
  const P* at(int64_t n, int64_t k) const { return data_ + (n * depth + k) * block; }

  int64_t K, N, block, blocks, depth;  // depth: K rounded up to 32, with zeros

 private:
  at::Tensor storage_;
  P* data_;  // [blocks][depth / kPair][block][kPair]
};

// A, in blocks of kLeftRows rows, the last rounded up to a multiple of 16.
template <typename P>
class Left {
 public:
  template <typename S>
  explicit Left(const Rows<S>& a);  // a [M, K]; read where it lies if it can be, so it must outlive this
  Left(int64_t K, int64_t M);       // room to be filled, block by block, from A^T
  template <typename S>
  void fill_transposed(int64_t m, const Rows<S>& a);  // a [K, M]

  int64_t blocks() const { return (M + kLeftRows - 1) / kLeftRows; }
  int64_t rows(int64_t m) const { return std::min(kLeftRows, M - m * kLeftRows); }  // without the padding
  int64_t padded_rows(int64_t m) const { return round_up(rows(m), 16); }
  // Row 0 of block m from column k on, a multiple of kBlockDepth.
  const P* at(int64_t m, int64_t k, int64_t* stride) const;

  int64_t K, M, depth;  // depth: K as it is summed

 private:
  const P* in_place_ = nullptr;
  int64_t stride_ = 0, packed_rows_ = 0;
  at::Tensor storage_;
  P* packed_ =
      nullptr;  // [depth / kBlockDepth][packed_rows_][kBlockDepth]; of rows in place the last block alone
};

// c [left.padded_rows(m), right.block] (+)= block m times block n.
template <typename P>
void multiply(const Left<P>& left, int64_t m, const Right<P>& right, int64_t n, Wide<P>* c, int64_t stride,
              bool add);

// Runs task(m, n) for every pair of blocks of left and right, over all threads: a few blocks of B, which stay
// in the cache, against all of A, by rows of C.
template <typename P, typename Task>
void for_block_pairs(const Left<P>& left, const Right<P>& right, const Task& task);

// to [left.M, right.N] += left right, over all threads.
template <typename P>
void add_product(const Left<P>& left, const Right<P>& right, Wide<P>* to, int64_t stride);

// Runs task(i) for every i in [0, count), spread over the threads; it may multiply.
template <typename Task>
void for_blocks(int64_t count, const Task& task) {
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(i);
    release_tiles();
  });
}

template <typename P, typename Task>
void for_block_pairs(const Left<P>& left, const Right<P>& right, const Task& task) {
  const int64_t bytes = right.depth * right.block * static_cast<int64_t>(sizeof(P));
  const int64_t group = std::max<int64_t>(1, kHeldBytes / bytes), M = left.blocks();
  for_blocks(M * right.blocks, [&](int64_t i) {
    const int64_t first = i / (group * M) * group, width = std::min(group, right.blocks - first),
                  j = i - first * M;
    task(j / width, first + j % width);
  });
}

// Calls run(S{}, P{}) with the type that tensors of `dtype` store and the type that blocks hold of them.
template <typename Run>
void for_block_type(at::ScalarType dtype, const Run& run) {
  if (dtype == at::kBFloat16 && has_bf16_tiles()) return run(at::BFloat16(), at::BFloat16());
  if (dtype == at::kBFloat16) return run(at::BFloat16(), float());
  if (dtype == at::kFloat) return run(float(), float());
  if (dtype == at::kDouble) return run(double(), double());
  throw Bug("ops compute in float32, float64 or bfloat16; given {}", at::toString(dtype));
}

// Bytes of a number in the blocks of a tensor with `element` bytes a number.
inline int64_t block_element(int64_t element) {
  return element == 2 && !has_bf16_tiles() ? 4 : element;
}

// x itself where its last stride is 1, else a copy.
at::Tensor by_rows(const at::Tensor& x);

}  // namespace titanium
