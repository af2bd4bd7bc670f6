// A weight is a handle: a name, a shape, how it is split, and where in a unit it lies (design D2, D7).
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "titanium/ops/handle.h"

namespace titanium {

class Unit;

enum class Split { kWhole, kRows, kCols };  // over the ranks of a tensor-parallel group

// What one coordinate of the tensor-parallel axis holds of a weight: rows or columns [begin, end), all of
// them for kWhole, and the coordinates [holders_begin, holders_end) that hold just the same.
struct TpPart {
  int64_t begin = 0, end = 0;
  int holders_begin = 0, holders_end = 1;
  bool operator==(const TpPart&) const = default;
};

// How a weight starts when no checkpoint gives it.
struct Init {
  enum Kind { kNormal, kOnes, kZeros } kind = kNormal;
  double std = 0.02;
};

class Weight final : public Handle {
 public:
  const std::string& name() const { return name_; }             // the Hugging Face name
  const std::vector<int64_t>& shape() const { return shape_; }  // of the whole weight
  int64_t numel() const;
  Split split() const { return split_; }
  const std::vector<TpPart>& parts() const { return parts_; }  // [tp]
  int tp() const { return tp_; }                               // this rank's coordinate
  std::vector<int64_t> local_shape(int tp) const;              // of the part of a coordinate
  std::vector<int64_t> local_shape() const { return local_shape(tp_); }
  int64_t local_numel(int tp) const;
  int64_t local_numel() const { return local_numel(tp_); }
  Init init() const { return init_; }
  int block() const { return block_; }  // the first block that uses it
  bool shared() const { return shared_; }

  // Of this rank's part, [local_shape].
  at::Tensor value() const override;
  const PackedWeight* packed() const override;  // where the unit keeps them
  bool trainable() const override;
  void accumulate(std::function<void(const at::Tensor&)> add) const override;

  // Where it lies: set once, by the ParamStore.
  void place(Unit* unit, int64_t offset);
  Unit& unit() const { return *unit_; }
  Unit* unit_here() const { return unit_; }   // null where other pipeline ranks have it
  int64_t offset() const { return offset_; }  // in elements from the start of the unit's flat buffer

 private:
  friend class WeightTable;
  Weight(std::string name, std::vector<int64_t> shape, Split split, Init init, int block,
         std::vector<TpPart> parts, int tp)
      : name_(std::move(name)),
        shape_(std::move(shape)),
        split_(split),
        parts_(std::move(parts)),
        tp_(tp),
        init_(init),
        block_(block) {}

  std::string name_;
  std::vector<int64_t> shape_;
  Split split_;
  std::vector<TpPart> parts_;
  int tp_;
  Init init_;
  int block_;
  bool shared_ = false;
  Unit* unit_ = nullptr;
  int64_t offset_ = 0;
};

// Weights with equal rows' width, declared in a row, used as one matrix (q, k, v; gate, up).  When they lie
// in memory without gaps this is a view; else value() copies and gradients are given out by parts.
class StackedRows final : public Handle {
 public:
  explicit StackedRows(std::vector<const Weight*> parts) : parts_(std::move(parts)) {}
  at::Tensor value() const override;
  const PackedWeight* packed() const override;  // null where there are gaps
  bool trainable() const override;
  void accumulate(std::function<void(const at::Tensor&)> add) const override;

 private:
  bool dense() const;
  std::vector<int64_t> shape() const;
  std::vector<const Weight*> parts_;
};

// All weights of a model, in the order of declaration.  The model owns it; load, init, save and sync visit
// it.
class WeightTable {
 public:
  // For the coordinate `tp` of an axis of `tp_size`.
  explicit WeightTable(int tp = 0, int tp_size = 1) : tp_(tp), tp_size_(tp_size) {}

  // parts [tp_size]: who holds what; empty where every coordinate holds all of it.
  const Weight* add(std::string name, std::vector<int64_t> shape, Split split, Init init, int block,
                    std::vector<TpPart> parts = {});
  const Handle* stack(std::vector<const Weight*> parts);  // see StackedRows
  // Says that a second block uses the weight too (a tied head): it becomes a unit of its own.
  void share(const Weight* weight, int block);

  const std::vector<std::unique_ptr<Weight>>& weights() const { return weights_; }
  const Weight* find(const std::string& name) const;  // null when absent
  struct Use {
    const Weight* weight;
    int block;
  };
  const std::vector<Use>& second_uses() const { return second_uses_; }

 private:
  int tp_, tp_size_;
  std::vector<std::unique_ptr<Weight>> weights_;
  std::vector<std::unique_ptr<StackedRows>> stacks_;
  std::vector<Use> second_uses_;
};

}  // namespace titanium
