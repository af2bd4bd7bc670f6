#include "titanium/shard/weight.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/shard/unit.h"

namespace titanium {

int64_t Weight::numel() const {
  int64_t n = 1;
  for (int64_t d : shape_) n *= d;
  return n;
}

void Weight::place(Unit* unit, int64_t offset) {
  unit_ = unit;
  offset_ = offset;
}

at::Tensor Weight::value() const {
  return unit_->view(offset_, shape_);
}
bool Weight::trainable() const {
  return unit_->trainable();
}

void Weight::accumulate(std::function<void(const at::Tensor&)> add) const {
  if (!trainable()) return;
  unit_->run_or_queue([this, add = std::move(add)] { add(unit_->grad_view(offset_, shape_)); });
}

bool StackedRows::dense() const {
  for (size_t i = 1; i < parts_.size(); ++i) {
    if (&parts_[i]->unit() != &parts_[0]->unit()) return false;
    if (parts_[i]->offset() != parts_[i - 1]->offset() + parts_[i - 1]->numel()) return false;
  }
  return true;
}

std::vector<int64_t> StackedRows::shape() const {
  std::vector<int64_t> shape = parts_[0]->shape();
  for (size_t i = 1; i < parts_.size(); ++i) shape[0] += parts_[i]->shape()[0];
  return shape;
}

at::Tensor StackedRows::value() const {
  if (dense()) return parts_[0]->unit().view(parts_[0]->offset(), shape());
  std::vector<at::Tensor> values;
  for (const Weight* part : parts_) values.push_back(part->value());
  return at::cat(values);
}

bool StackedRows::trainable() const {
  for (const Weight* part : parts_) {
    if (part->trainable()) return true;
  }
  return false;
}

void StackedRows::accumulate(std::function<void(const at::Tensor&)> add) const {
  if (!trainable()) return;
  Unit& unit = parts_[0]->unit();
  if (dense()) {
    unit.run_or_queue(
        [this, &unit, add = std::move(add)] { add(unit.grad_view(parts_[0]->offset(), shape())); });
    return;
  }
  unit.run_or_queue([this, &unit, add = std::move(add)] {
    const at::Tensor all = at::zeros(shape(), at::TensorOptions().dtype(unit.dtypes().reduce));
    add(all);
    int64_t row = 0;
    for (const Weight* part : parts_) {
      const int64_t rows = part->shape()[0];
      if (part->trainable())
        part->unit().grad_view(part->offset(), part->shape()).add_(all.narrow(0, row, rows));
      row += rows;
    }
  });
}

const Weight* WeightTable::add(std::string name, std::vector<int64_t> shape, Split split, Init init,
                               int block) {
  if (find(name)) throw Bug("weight '{}' is declared twice", name);
  weights_.push_back(std::make_unique<Weight>(std::move(name), std::move(shape), split, init, block));
  return weights_.back().get();
}

const Handle* WeightTable::stack(std::vector<const Weight*> parts) {
  stacks_.push_back(std::make_unique<StackedRows>(std::move(parts)));
  return stacks_.back().get();
}

void WeightTable::share(const Weight* weight, int block) {
  const_cast<Weight*>(weight)->shared_ = true;
  second_uses_.push_back({weight, block});
}

const Weight* WeightTable::find(const std::string& name) const {
  for (const auto& weight : weights_) {
    if (weight->name() == name) return weight.get();
  }
  return nullptr;
}

}  // namespace titanium
