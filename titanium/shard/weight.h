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

// How a weight starts when no checkpoint gives it.
struct Init {
  enum Kind { kNormal, kOnes, kZeros } kind = kNormal;
  double std = 0.02;
};

class Weight final : public Handle {
 public:
  Weight(std::string name, std::vector<int64_t> shape, Split split, Init init, int block)
      : name_(std::move(name)), shape_(std::move(shape)), split_(split), init_(init), block_(block) {}

  const std::string& name() const { return name_; }  // the Hugging Face name
  const std::vector<int64_t>& shape() const { return shape_; }
  Split split() const { return split_; }
  Init init() const { return init_; }
  int block() const { return block_; }  // the first block that uses it
  bool shared() const { return shared_; }
  int64_t numel() const;

  at::Tensor value() const override;
  bool trainable() const override;
  void accumulate(std::function<void(const at::Tensor&)> add) const override;

  // Where it lies: set once, by the ParamStore.
  void place(Unit* unit, int64_t offset);
  Unit& unit() const { return *unit_; }
  int64_t offset() const { return offset_; }  // in elements from the start of the unit's flat buffer

 private:
  friend class WeightTable;
  std::string name_;
  std::vector<int64_t> shape_;
  Split split_;
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
  const Weight* add(std::string name, std::vector<int64_t> shape, Split split, Init init, int block);
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
  std::vector<std::unique_ptr<Weight>> weights_;
  std::vector<std::unique_ptr<StackedRows>> stacks_;
  std::vector<Use> second_uses_;
};

}  // namespace titanium
