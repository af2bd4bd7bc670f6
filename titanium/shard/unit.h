// A unit: the weights of a block that are gathered and reduced together, as one flat buffer (design D3).
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "titanium/dist/group.h"
#include "titanium/shard/weight.h"

namespace titanium {

struct StoreDtypes {
  at::ScalarType param = at::kFloat;    // masters: what the optimizer updates and a checkpoint holds
  at::ScalarType compute = at::kFloat;  // what blocks see
  at::ScalarType reduce = at::kFloat;   // gradients
};

class Unit {
 public:
  static constexpr int64_t kAlign = 64;  // elements: weights and cuts start on multiples of it, gaps are zero

  Unit(std::string name, std::vector<Weight*> weights, bool trainable, StoreDtypes dtypes, Group group);

  const std::string& name() const { return name_; }
  const std::vector<Weight*>& weights() const { return weights_; }
  bool trainable() const { return trainable_; }
  int64_t numel() const { return numel_; }  // of the whole unit, gaps included
  int64_t bytes_gathered() const;           // what unshard adds to the memory
  const StoreDtypes& dtypes() const { return dtypes_; }

  // This rank's part of the masters and gradients, flat.
  const at::Tensor& shard() const { return shard_; }
  at::Tensor grad_shard() const;  // of the same length; undefined before the first zero_grad
  bool has_grad() const { return grad_.defined(); }

  // Gather: the masters, cast to the compute dtype, become visible to blocks.  A second call without a write
  // in between costs nothing.  Where the dtypes agree and the group is one rank, the masters themselves are
  // the view.
  void unshard();
  void reshard(
      bool keep_memory);  // blocks must not ask any more; keep_memory keeps the cast for the next unshard
  bool gathered() const { return gathered_; }
  at::Tensor view(int64_t offset, const std::vector<int64_t>& shape) const;
  at::Tensor grad_view(int64_t offset, const std::vector<int64_t>& shape);

  void zero_grad();     // keeps the memory
  void release_grad();  // gives the memory back
  void reduce();        // sums gradients over the group into this rank's part

  // The masters changed, so the cast is stale; unless the writer made it anew in the same pass.
  void written(bool cast_too = false) { fresh_ = cast_too; }
  // The cast of this rank's part, flat, for such a writer; undefined where unshard does more than to cast
  // (other ranks), makes no cast, or has no memory for it now.
  at::Tensor cast_to_write() const;
  // What blocks see, flat [numel], where that is there and current without a gather; undefined elsewhere.
  at::Tensor current() const;

  // A weight gradient, now or later (zero-bubble schedules run the queue as an action of its own).
  void run_or_queue(std::function<void()> work);

 private:
  std::string name_;
  std::vector<Weight*> weights_;
  bool trainable_;
  StoreDtypes dtypes_;
  Group group_;
  int64_t numel_ = 0;
  at::Tensor shard_, compute_, grad_;
  bool gathered_ = false;
  bool fresh_ = false;
};

}  // namespace titanium
