// A model is a row of blocks: the embedding, the layers, the head.  A block's graph ends at its input; what
// happens between blocks is the schedule's business (design D1).
#pragma once
#include <memory>
#include <vector>

#include "titanium/batch/packed_batch.h"
#include "titanium/ops/attention.h"
#include "titanium/ops/linear_logprob.h"
#include "titanium/shard/weight.h"

namespace titanium {

class KvCache;

// How to run, the same for all blocks of a micro-batch of T tokens.
struct BlockInput {
  at::Tensor tokens;            // [T] int64
  std::vector<int64_t> bounds;  // [documents + 1]
  RopeAngles angles;            // [T, H/2]
  KvCache* cache = nullptr;     // decoding: document d goes on where cache slot slots[d] ends
  std::vector<int64_t> slots;   // [documents]

  bool keep_cheap =
      false;  // keep normalised inputs and activations instead of forming them again in backward

  // For the head alone.
  at::Tensor labels;       // [T] int64, negative = none
  at::Tensor temperature;  // [T], or undefined for 1
  at::Tensor rows;         // [R] int64: the positions that are computed; undefined = all
  HeadWants wants;
  at::Tensor
      nll_weight;  // [T]: the loss is -sum weight logprob, and the head forms it (see Loss::weighted_nll)
};

// What blocks leave besides the residual stream.
struct BlockOutput {
  HeadStats stats;  // of the head
  at::Tensor loss;  // of the head, scalar, when nll_weight was given
};

class Block {
 public:
  virtual ~Block() = default;
  // x [T, D] -> [T, D]; with tensor parallelism the rank's tokens of both, [T/tp, D].  The embedding ignores
  // the values of x (but its graph starts there); the head fills `out` and returns an undefined tensor.
  virtual at::Tensor forward(const at::Tensor& x, const BlockInput& in, BlockOutput& out) const = 0;
  // In bytes for T tokens: activations that a forward keeps for its backward, and what a forward and a
  // backward hold for a moment.
  struct Bytes {
    int64_t saved = 0, forward_work = 0, backward_work = 0;
  };
  virtual Bytes bytes(int64_t T, int64_t element, bool keep_cheap) const = 0;
  // What a forward computes and moves on this rank, for T tokens in documents of L.  A backward has twice the
  // products, 2.5 times the attention (it forms the scores again) and as many bytes.
  struct Cost {
    double matmul = 0, attention = 0, head = 0;  // FLOPs: multiply-adds times 2
    double tp_bytes = 0;                         // that come from tensor-parallel ranks
    int tp_calls = 0;
    double tp_again_bytes = 0;  // that come once more for a backward without keep_cheap
    int tp_again_calls = 0;
  };
  virtual Cost cost(int64_t T, int64_t L, int64_t element) const = 0;
};

}  // namespace titanium
