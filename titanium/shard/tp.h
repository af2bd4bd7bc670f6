// Tensor parallelism with sequence parallelism (Megatron's; Korthikanti et al., "Reducing activation
// recomputation in large transformer models", 2022): between blocks each rank of the tp group has the stream
// of T/tp tokens, inside a block all T tokens of its own heads or columns.  What a group of one runs and what
// more ranks run is decided here, and nowhere else.
#pragma once
#include <memory>

#include "titanium/dist/group.h"
#include "titanium/ops/row_exchange.h"
#include "titanium/ops/vocab_slice.h"
#include "titanium/shard/weight.h"

namespace titanium {

// A rank's place on the tensor-parallel axis.  Copies are cheap; one must outlive the graphs made with it.
class Tp {
 public:
  Tp() : Tp(Group()) {}  // one rank
  explicit Tp(const Group& group);
  // A place without a group, for what only declares weights and counts.  Nothing can run on it.
  Tp(int rank, int size) : rank_(rank), size_(size) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  const RowExchange* rows() const;                  // of the group; null for one rank
  at::Tensor gather(const at::Tensor& mine) const;  // [...] of every rank, of one shape -> [tp, ...]
  // How a vocabulary that is cut as `parts` is put together.  Null for one rank.
  std::shared_ptr<const VocabSlice> vocabulary(const std::vector<TpPart>& parts) const;

 private:
  int rank_ = 0, size_ = 1;
  Group group_;
  std::shared_ptr<const RowExchange> rows_;
};

// T tokens of the batch, a multiple of tp (Bug otherwise: the packer pads, design D9); t = T/tp of them on
// this rank.

// x [t, ...] -> [T, ...], for what every rank then does alike, a loss: the gradient by x is this rank's rows
// of it.
at::Tensor gather_values(const at::Tensor& x, const Tp& tp);
// x [T, ...] on every rank, of which one is not 0 -> this rank's rows of the sum  [t, ...].  Overwrites x.
at::Tensor scatter_rows(const at::Tensor& x, const Tp& tp);

}  // namespace titanium
