#include "titanium/shard/weight.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/shard/unit.h"

namespace titanium {

namespace {

int64_t product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

}  // namespace

int64_t Weight::numel() const {
  return product(shape_);
}

std::vector<int64_t> Weight::local_shape(int tp) const {
  std::vector<int64_t> shape = shape_;
  if (split_ != Split::kWhole) shape[split_ == Split::kRows ? 0 : 1] = parts_[tp].end - parts_[tp].begin;
  return shape;
}

int64_t Weight::local_numel(int tp) const {
  return product(local_shape(tp));
}

void Weight::place(Unit* unit, int64_t offset) {
  unit_ = unit;
  offset_ = offset;
}

at::Tensor Weight::value() const {
  return unit_->view(offset_, local_shape());
}
const PackedWeight* Weight::packed() const {
  return unit_->packed(offset_, local_shape());
}
bool Weight::trainable() const {
  return unit_->trainable();
}

void Weight::accumulate(std::function<void(const at::Tensor&)> add) const {
  if (!trainable()) return;
  unit_->run_or_queue([this, add = std::move(add)] { add(unit_->grad_view(offset_, local_shape())); });
}

bool StackedRows::dense() const {
  for (size_t i = 1; i < parts_.size(); ++i) {
    if (&parts_[i]->unit() != &parts_[0]->unit()) return false;
    if (parts_[i]->offset() != parts_[i - 1]->offset() + parts_[i - 1]->local_numel()) return false;
  }
  return true;
}

std::vector<int64_t> StackedRows::shape() const {
  std::vector<int64_t> shape = parts_[0]->local_shape();
  for (size_t i = 1; i < parts_.size(); ++i) shape[0] += parts_[i]->local_shape()[0];
  return shape;
}

at::Tensor StackedRows::value() const {
  if (dense()) return parts_[0]->unit().view(parts_[0]->offset(), shape());
  std::vector<at::Tensor> values;
  for (const Weight* part : parts_) values.push_back(part->value());
  return at::cat(values);
}

const PackedWeight* StackedRows::packed() const {
  return dense() ? parts_[0]->unit().packed(parts_[0]->offset(), shape()) : nullptr;
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
      const int64_t rows = part->local_shape()[0];
      if (part->trainable())
        part->unit().grad_view(part->offset(), part->local_shape()).add_(all.narrow(0, row, rows));
      row += rows;
    }
  });
}

const Weight* WeightTable::add(std::string name, std::vector<int64_t> shape, Split split, Init init,
                               int block, std::vector<TpPart> parts) {
  if (find(name)) throw Bug("weight '{}' is declared twice", name);
  if (parts.empty()) {
    const int64_t extent = split == Split::kCols ? shape.at(1) : shape.empty() ? 1 : shape[0];
    parts.assign(tp_size_, {0, extent, 0, tp_size_});
  }
  if (static_cast<int>(parts.size()) != tp_size_) {
    throw Bug("weight '{}' has {} parts for {} tensor-parallel ranks", name, parts.size(), tp_size_);
  }
  weights_.push_back(std::unique_ptr<Weight>(
      new Weight(std::move(name), std::move(shape), split, init, block, std::move(parts), tp_)));
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
