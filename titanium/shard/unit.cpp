#include "titanium/shard/unit.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/shard/buffer.h"

namespace titanium {

Unit::Unit(std::string name, std::vector<Weight*> weights, bool trainable, StoreDtypes dtypes, Group group)
    : name_(std::move(name)),
      weights_(std::move(weights)),
      trainable_(trainable),
      dtypes_(dtypes),
      group_(std::move(group)) {
  const auto round_up = [](int64_t n, int64_t m) { return (n + m - 1) / m * m; };
  for (Weight* weight : weights_) {
    weight->place(this, numel_);
    numel_ += round_up(weight->numel(), kAlign);
  }
  numel_ = round_up(numel_, kAlign * group_.size());
  shard_ = zero_pages(numel_ / group_.size(), dtypes_.param);
}

int64_t Unit::bytes_gathered() const {
  if (dtypes_.param == dtypes_.compute && group_.size() == 1) return 0;
  return numel_ * static_cast<int64_t>(c10::elementSize(dtypes_.compute));
}

void Unit::unshard() {
  gathered_ = true;
  if (fresh_) return;
  fresh_ = true;
  if (dtypes_.param == dtypes_.compute && group_.size() == 1) {
    compute_ = shard_;
    return;
  }
  const at::NoGradGuard no_grad;
  if (!compute_.defined()) compute_ = zero_pages(numel_, dtypes_.compute);
  const int64_t part = numel_ / group_.size();
  compute_.narrow(0, part * group_.rank(), part).copy_(shard_);
  group_.all_gather(compute_);
}

void Unit::reshard(bool keep_memory) {
  gathered_ = false;
  if (keep_memory) return;
  compute_.reset();
  fresh_ = false;
}

at::Tensor Unit::cast_to_write() const {
  const bool alone = group_.size() == 1 && dtypes_.param != dtypes_.compute;
  return alone ? compute_ : at::Tensor();
}

at::Tensor Unit::current() const {
  if (dtypes_.param == dtypes_.compute && group_.size() == 1) return shard_;
  return fresh_ ? compute_ : at::Tensor();
}

at::Tensor Unit::view(int64_t offset, const std::vector<int64_t>& shape) const {
  if (!gathered_) throw Bug("unit '{}' is used while it is not gathered", name_);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  return compute_.as_strided(shape, strides, offset);
}

at::Tensor Unit::grad_view(int64_t offset, const std::vector<int64_t>& shape) {
  if (!grad_.defined()) zero_grad();
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return grad_.narrow(0, offset, n).view(shape);
}

at::Tensor Unit::grad_shard() const {
  if (!grad_.defined()) return {};
  return grad_.narrow(0, shard_.numel() * group_.rank(), shard_.numel());
}

void Unit::zero_grad() {
  if (!trainable_) return;
  if (grad_.defined()) {
    grad_.zero_();
  } else {
    grad_ = zero_pages(numel_, dtypes_.reduce);
  }
}

void Unit::release_grad() {
  grad_.reset();
}

void Unit::reduce() {
  if (grad_.defined()) group_.reduce_scatter(grad_);
}

void Unit::run_or_queue(std::function<void()> work) {
  const at::NoGradGuard no_grad;
  work();
}

}  // namespace titanium
