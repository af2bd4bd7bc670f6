// The parts that decoder layers are made of.
// T tokens, D width, N query heads, K key heads, H head width, F hidden width of the MLP.  With tensor
// parallel ranks t = T/tp tokens of the stream, and n, k, f, v: what this rank has of N, K, F and the
// vocabulary.
#pragma once
#include <string>

#include "titanium/models/block.h"
#include "titanium/shard/tp.h"

namespace titanium {

// Declares the weights of one block under a name prefix.
class Weights {
 public:
  Weights(WeightTable& table, std::string prefix, int block, double init_std)
      : table_(table), prefix_(std::move(prefix)), block_(block), init_std_(init_std) {}
  // Shapes are of the whole weight; `parts` say who holds what of a split one.
  const Weight* matrix(const std::string& name, int64_t out, int64_t in, Split split,
                       std::vector<TpPart> parts = {});        // normal(0, init_std)
  const Weight* norm(const std::string& name, int64_t width);  // ones
  const Weight* bias(const std::string& name, int64_t width, Split split,
                     std::vector<TpPart> parts = {});  // zeros
  const Handle* stack(std::vector<const Weight*> parts) { return table_.stack(std::move(parts)); }

 private:
  WeightTable& table_;
  std::string prefix_;
  int block_;
  double init_std_;
};

struct AttentionShape {
  int64_t D = 0, N = 0, K = 0, H = 0;
  int64_t window = 0;  // 0 = none
  double norm_eps = 0;
  bool qkv_bias = false, o_bias = false;
  bool qk_norm = false;
  int64_t layer = 0;  // in the KV cache
};

// x + o(attention(rope(q), rope(k), v)), q, k, v from the normalised x; q, k, v run as one matrix.
class AttentionPart {
 public:
  AttentionPart(const AttentionShape& shape, Weights w, const Tp& tp);
  at::Tensor forward(const at::Tensor& x, const BlockInput& in) const;  // [t, D] -> [t, D]
  Block::Bytes bytes(int64_t T, int64_t element, bool keep_cheap) const;
  Block::Cost cost(int64_t T, int64_t L, int64_t element) const;

 private:
  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const BlockInput& in) const;
  AttentionShape s_;
  Tp tp_;
  int64_t n_, k_;
  const Weight *norm_, *o_, *o_bias_ = nullptr, *q_norm_ = nullptr, *k_norm_ = nullptr;
  const Handle *qkv_, *qkv_bias_ = nullptr;
};

// x + down(silu(gate) * up), gate and up from the normalised x, as one matrix.
class MlpPart {
 public:
  MlpPart(int64_t D, int64_t F, double norm_eps, bool bias, Weights w, const Tp& tp);
  at::Tensor forward(const at::Tensor& x, const BlockInput& in) const;  // [t, D] -> [t, D]
  Block::Bytes bytes(int64_t T, int64_t element, bool keep_cheap) const;
  Block::Cost cost(int64_t T, int64_t L, int64_t element) const;

 private:
  Tp tp_;
  int64_t D_, f_;
  double eps_;
  const Weight *norm_, *down_, *down_bias_ = nullptr;
  const Handle *gate_up_, *gate_up_bias_ = nullptr;
};

class EmbedBlock final : public Block {
 public:
  EmbedBlock(int64_t V, int64_t D, Weights w, const Tp& tp);
  at::Tensor forward(const at::Tensor& x, const BlockInput& in, BlockOutput& out) const override;
  Bytes bytes(int64_t T, int64_t element, bool keep_cheap) const override;
  Cost cost(int64_t T, int64_t L, int64_t element) const override;
  const Weight* weight() const { return weight_; }

 private:
  Tp tp_;
  int64_t D_;
  std::shared_ptr<const VocabSlice> slice_;
  const Weight* weight_;
};

// Final norm, then the fused head.
class HeadBlock final : public Block {
 public:
  // `tied`: the embedding's matrix, or null for a matrix of its own.
  HeadBlock(int64_t V, int64_t D, double norm_eps, const Weight* tied, Weights norm, Weights head,
            const Tp& tp);
  at::Tensor forward(const at::Tensor& x, const BlockInput& in, BlockOutput& out) const override;
  Bytes bytes(int64_t T, int64_t element, bool keep_cheap) const override;
  Cost cost(int64_t T, int64_t L, int64_t element) const override;
  // Rows of the residual stream [R, D], the same on every rank -> [R, V], for sampling.
  at::Tensor logits(const at::Tensor& x) const;

 private:
  Tp tp_;
  int64_t D_, v_;
  double eps_;
  std::shared_ptr<const VocabSlice> slice_;
  const Weight *norm_, *weight_;
};

// Final norm, then one number a position: HeadStats::value, in the statistics' dtype, 0 where in.rows has no
// row.  Every tensor-parallel rank has all of its weights, and works on its part of the tokens.
class ValueHeadBlock final : public Block {
 public:
  ValueHeadBlock(int64_t D, double norm_eps, Weights norm, Weights head, const Tp& tp);
  at::Tensor forward(const at::Tensor& x, const BlockInput& in, BlockOutput& out) const override;
  Bytes bytes(int64_t T, int64_t element, bool keep_cheap) const override;
  Cost cost(int64_t T, int64_t L, int64_t element) const override;

 private:
  Tp tp_;
  int64_t D_;
  double eps_;
  const Weight *norm_, *score_, *bias_;
};

}  // namespace titanium
