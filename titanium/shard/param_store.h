// All units of this rank.  The only thing that the optimizer, checkpoints and weight sync look at.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "titanium/dist/mesh.h"
#include "titanium/shard/unit.h"

namespace titanium {

// A part of a weight that one rank owns: elements [begin, end), counted row-major in the part of the weight
// that the tensor-parallel coordinate `tp` holds, lie at [offset, offset + end - begin) of that rank's shard
// of the unit.
struct Slice {
  const Weight* weight;
  Unit* unit;
  int tp;
  int64_t begin, end;
  int64_t offset;

  int64_t count() const { return end - begin; }
  at::Tensor of(const at::Tensor& shard) const { return shard.narrow(0, offset, count()); }

  // The slice as runs that lie together in the whole weight: elements [global, global + count), counted
  // row-major in the weight, are elements [begin, begin + count) of the slice.  One run unless the weight is
  // cut by columns.
  struct Run {
    int64_t global, begin, count;
  };
  void each_run(const std::function<void(const Run&)>& visit) const;
  int64_t global_index(int64_t i) const;  // of element i of the slice, row-major in the whole weight
};

struct StoreOptions {
  StoreDtypes dtypes;
  std::function<bool(const std::string& name)> frozen;  // null: everything trains
  Mesh mesh;
  std::vector<int> pp_of_block;  // the pp coordinate that has each block; empty: all are on every rank
};

// A unit of the model, on whichever ranks it is: the same list on all of them.
struct UnitPlace {
  std::string name;
  std::vector<Weight*> weights;
  bool trainable = true;
  std::vector<int> blocks;  // that use it, ascending
  std::vector<int> pps;     // pp coordinates that have them, ascending; empty where there is no pipeline
  Unit* unit = nullptr;     // null where this rank has none of them
};

// A unit as a tensor-parallel coordinate has it: elements of the whole and of each rank, and its ranks.
struct UnitSize {
  int64_t numel, part;
  int replicas;
};

class ParamStore {
 public:
  // Allocates the masters (zeroed) of this rank's weights and places them.
  ParamStore(WeightTable& table, int blocks, StoreOptions options);

  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  Unit& unit(int index) const { return *units_.at(index); }
  std::vector<int> units_of_block(int block) const { return block_units_.at(block); }
  const std::vector<UnitPlace>& places() const { return places_; }
  UnitSize size_of(const UnitPlace& place) const;  // for this rank's coordinate, on whichever ranks it is
  const WeightTable& table() const { return table_; }
  const StoreDtypes& dtypes() const { return options_.dtypes; }
  const Mesh& mesh() const { return options_.mesh; }
  bool whole() const;  // every unit is: this rank holds all that its tensor-parallel coordinate computes with

  // Every weight that this rank owns a part of, in the order of the table.
  std::vector<Slice> slices() const { return slices_of(mesh().at()); }
  // The same of any rank; its unit is null where this rank has none of its own.  Over the ranks of
  // mesh().copy() they hold every element of every weight once.
  std::vector<Slice> slices_of(const Coordinates& at) const;
  const Weight& weight(const std::string& name) const;  // Bug when absent
  int64_t parameters() const;                           // elements of all weights, a tied one once

  // Random start, a pure function of (seed, weight name, element): the same for every layout.
  // With `which`, of those weights alone.
  void init(uint64_t seed, const std::function<bool(const Weight&)>& which = {});

  void zero_grad();
  void release_grad();
  void release_casts();  // gives back the memory of what blocks see, which the next unshard makes anew

  // Weight gradients of what runs from here on are work for later, in this queue; null: they are formed at
  // once.
  void defer_gradients(std::vector<std::function<void()>>* queue) { deferred_->queue = queue; }

  // Whoever still reads the masters (an async save) asks to be told before a unit is written (design D13).
  // The hook waits for, or copies, what it needs.  Everything that writes masters or optimizer state calls
  // before_write first.
  using WriteHook = std::function<void(Unit&)>;
  void set_write_hook(WriteHook hook) { hook_ = std::move(hook); }
  void before_write(Unit& unit) const {
    check_free();
    if (hook_) hook_(unit);
  }

  // For readers that cannot copy (a stream of weights): while the result lives, before_write throws a
  // BadConfig that names `reader`.  check_free throws it too, for a writer with state of its own to keep
  // right.
  std::shared_ptr<const void> hold(std::string reader);
  void check_free() const;

  // The version of the next stream of weights: `wanted`, or one more than the largest there was.
  int64_t stream_version(std::optional<int64_t> wanted);

 private:
  void place_units(int blocks);

  WeightTable& table_;
  StoreOptions options_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<std::vector<int>> block_units_;  // of this rank's blocks
  std::vector<UnitPlace> places_;
  std::shared_ptr<Unit::Deferred> deferred_ = std::make_shared<Unit::Deferred>();
  WriteHook hook_;
  std::vector<std::weak_ptr<const std::string>> readers_;
  int64_t stream_version_ = 0;
};

}  // namespace titanium
