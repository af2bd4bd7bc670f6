// A unit: the weights of a block that are gathered and reduced together, as one flat buffer (design D3).
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "titanium/dist/group.h"
#include "titanium/shard/buffer.h"
#include "titanium/shard/layout.h"
#include "titanium/shard/weight.h"

namespace titanium {

struct StoreDtypes {
  at::ScalarType param = at::kFloat;    // masters: what the optimizer updates and a checkpoint holds
  at::ScalarType compute = at::kFloat;  // what blocks see
  at::ScalarType reduce = at::kFloat;   // gradients
};

struct UnitGroups {
  Group replicas;  // the ranks of one dp_replicate copy that hold the same slice: the buffer is cut over them
  Group replicate;  // the ranks that own the same elements in the other copies
};

class Unit {
 public:
  static constexpr int64_t kAlign = UnitLayout::kAlign;

  // Where this rank's weight gradients go while they are put off.
  struct Deferred {
    std::vector<std::function<void()>>* queue = nullptr;  // null: they are formed at once
  };

  Unit(std::string name, std::vector<Weight*> weights, bool trainable, StoreDtypes dtypes, UnitGroups groups,
       std::shared_ptr<BufferPool> pool, std::shared_ptr<Deferred> deferred = nullptr);

  const std::string& name() const { return name_; }
  const std::vector<Weight*>& weights() const { return weights_; }
  bool trainable() const { return trainable_; }
  int64_t numel() const { return layout_.numel; }  // of the whole unit, gaps included
  int64_t bytes_gathered() const;                  // what unshard adds to the memory
  const StoreDtypes& dtypes() const { return dtypes_; }
  const UnitGroups& groups() const { return groups_; }
  // The shard is all of the unit: nothing is gathered, so a cast that is kept saves the next unshard.
  bool whole() const { return groups_.replicas.size() == 1; }

  // This rank's part of the masters and gradients, flat.
  const at::Tensor& shard() const { return shard_; }
  at::Tensor grad_shard() const;  // of the same length; undefined before the first zero_grad
  bool has_grad() const { return grad_.defined(); }

  // Gather: the masters, cast to the compute dtype, become visible to blocks.  A second call without a write
  // in between costs nothing.  Where the dtypes agree and the group is one rank, the masters themselves are
  // the view.  Between start and finish other work goes on; the ranks of the group start in the same order.
  void start_unshard();
  void finish_unshard();
  void unshard() {
    start_unshard();
    finish_unshard();
  }
  void reshard(
      bool keep_memory);  // blocks must not ask any more; keep_memory keeps the cast for the next unshard
  // As reshard, whatever is under way: after an exception has ended a plan.
  void abandon() noexcept;
  bool gathered() const { return gathered_; }
  at::Tensor view(int64_t offset, const std::vector<int64_t>& shape) const;
  at::Tensor grad_view(int64_t offset, const std::vector<int64_t>& shape);  // of this rank's contribution

  void zero_grad();     // keeps the memory
  void release_grad();  // gives the memory back
  // Sums what the ranks have contributed since the last reduction, and adds this rank's part of the sum to
  // grad_shard.
  void start_reduce();
  void finish_reduce();
  void reduce() {
    start_reduce();
    finish_reduce();
  }

  // Whether a matrix is packed when an op first asks for that.  It stays so until the unit is written or its
  // memory is given back: as much memory again.  In bf16 alone; in other dtypes there is no such copy.
  void keep_packed(bool keep);
  const PackedWeight* packed(int64_t offset, const std::vector<int64_t>& shape) const;

  // The masters changed, so the cast is stale; unless the writer made it anew in the same pass.  Said on
  // every rank of the group, also where the rank's part did not change.
  void written(bool cast_too = false) {
    fresh_ = cast_too;
    packed_.clear();
  }
  // The cast of this rank's part, flat, for such a writer; undefined where unshard does more than to cast
  // (other ranks), makes no cast, or has no memory for it now.
  at::Tensor cast_to_write() const;
  // What blocks see, flat [numel], where that is there and current without a gather; undefined elsewhere.
  at::Tensor current() const;

  // A weight gradient, now or later (zero-bubble schedules run the queue as an action of its own).
  void run_or_queue(std::function<void()> work);

 private:
  bool shows_masters() const { return whole() && dtypes_.param == dtypes_.compute; }
  // Contributions go straight into grad_: no other rank adds to it.
  bool adds_in_place() const { return whole() && groups_.replicate.size() == 1; }
  at::Tensor own(const at::Tensor& flat) const;  // this rank's part of [numel]

  std::string name_;
  std::vector<Weight*> weights_;
  bool trainable_;
  StoreDtypes dtypes_;
  UnitGroups groups_;
  UnitLayout layout_;
  std::shared_ptr<BufferPool> pool_;
  std::shared_ptr<Deferred> deferred_;
  at::Tensor shard_;    // [part] masters
  at::Tensor compute_;  // [numel] what blocks see
  at::Tensor partial_;  // [numel] contributions that are not reduced yet; undefined where there are none
  at::Tensor grad_;     // [part]
  Pending gathering_, reducing_;
  // By offset and rows; while keeps_packed_.
  mutable std::map<std::pair<int64_t, int64_t>, std::shared_ptr<const PackedWeight>> packed_;
  bool keeps_packed_ = false;
  bool gathered_ = false;
  bool fresh_ = false;  // compute_ holds, or is getting, the masters as they are
};

}  // namespace titanium
