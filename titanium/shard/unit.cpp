#include "titanium/shard/unit.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/ops/products.h"

namespace titanium {

Unit::Unit(std::string name, std::vector<Weight*> weights, bool trainable, StoreDtypes dtypes,
           UnitGroups groups, std::shared_ptr<BufferPool> pool, std::shared_ptr<Deferred> deferred)
    : name_(std::move(name)),
      weights_(std::move(weights)),
      trainable_(trainable),
      dtypes_(dtypes),
      groups_(std::move(groups)),
      layout_(weights_, weights_.at(0)->tp(), groups_.replicas.size()),
      pool_(std::move(pool)),
      deferred_(std::move(deferred)),
      shard_(zero_pages(layout_.part, dtypes_.param)) {
  for (size_t i = 0; i < weights_.size(); ++i) weights_[i]->place(this, layout_.offsets[i]);
}

at::Tensor Unit::own(const at::Tensor& flat) const {
  return flat.narrow(0, layout_.part * groups_.replicas.rank(), layout_.part);
}

int64_t Unit::bytes_gathered() const {
  return shows_masters() ? 0 : numel() * static_cast<int64_t>(c10::elementSize(dtypes_.compute));
}

void Unit::start_unshard() {
  if (fresh_) return;
  fresh_ = true;
  if (shows_masters()) {
    compute_ = shard_;
    return;
  }
  const at::NoGradGuard no_grad;
  if (!compute_.defined()) compute_ = pool_->take(numel(), dtypes_.compute);
  own(compute_).copy_(shard_);
  gathering_ = groups_.replicas.start_all_gather(compute_);
}

void Unit::finish_unshard() {
  gathering_.wait();
  gathered_ = true;
}

void Unit::reshard(bool keep_memory) {
  gathering_.wait();
  gathered_ = false;
  if (keep_memory) return;
  packed_.clear();
  if (compute_.defined() && !shows_masters()) pool_->give_back(std::move(compute_));
  compute_.reset();
  fresh_ = false;
}

void Unit::abandon() noexcept {
  gathering_ = Pending();  // waits, and drops an error
  reducing_ = Pending();
  gathered_ = false;
  if (whole()) return;
  packed_.clear();
  compute_.reset();
  fresh_ = false;
}

void Unit::keep_packed(bool keep) {
  keeps_packed_ = keep && dtypes_.compute == at::kBFloat16;
}

const PackedWeight* Unit::packed(int64_t offset, const std::vector<int64_t>& shape) const {
  if (shape.size() != 2) return nullptr;
  const auto found = packed_.find({offset, shape[0]});
  if (found != packed_.end()) return found->second.get();
  if (!keeps_packed_) return nullptr;
  auto& packed = packed_[{offset, shape[0]}];
  packed = std::make_shared<const PackedWeight>(view(offset, shape));
  return packed.get();
}

at::Tensor Unit::cast_to_write() const {
  const bool casts = whole() && dtypes_.param != dtypes_.compute;
  return casts ? compute_ : at::Tensor();
}

at::Tensor Unit::current() const {
  if (shows_masters()) return shard_;
  return fresh_ ? compute_ : at::Tensor();
}

at::Tensor Unit::view(int64_t offset, const std::vector<int64_t>& shape) const {
  if (!gathered_) throw Bug("unit '{}' is used while it is not gathered", name_);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i > 0; --i) strides[i - 1] = strides[i] * shape[i];
  return compute_.as_strided(shape, strides, offset);
}

at::Tensor Unit::grad_view(int64_t offset, const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  at::Tensor& sink = adds_in_place() ? grad_ : partial_;
  if (!sink.defined()) {
    if (adds_in_place()) {
      zero_grad();
    } else {
      partial_ = pool_->take(numel(), dtypes_.reduce).zero_();
    }
  }
  return sink.narrow(0, offset, n).view(shape);
}

at::Tensor Unit::grad_shard() const {
  return grad_;
}

void Unit::zero_grad() {
  if (!trainable_) return;
  if (partial_.defined()) pool_->give_back(std::exchange(partial_, at::Tensor()));
  if (grad_.defined()) {
    grad_.zero_();
  } else {
    grad_ = zero_pages(layout_.part, dtypes_.reduce);
  }
}

void Unit::release_grad() {
  grad_.reset();
  partial_.reset();
}

void Unit::start_reduce() {
  if (adds_in_place() || !trainable_) return;
  const at::NoGradGuard no_grad;
  // A rank without work of its own for the unit takes part all the same.
  if (!partial_.defined()) partial_ = pool_->take(numel(), dtypes_.reduce).zero_();
  reducing_ = groups_.replicas.start_reduce_scatter(partial_);
}

void Unit::finish_reduce() {
  if (adds_in_place() || !trainable_) return;
  const at::NoGradGuard no_grad;
  reducing_.wait();
  const at::Tensor sum = own(partial_);
  groups_.replicate.all_reduce(sum);
  if (!grad_.defined()) grad_ = zero_pages(layout_.part, dtypes_.reduce);
  grad_.add_(sum);
  pool_->give_back(std::exchange(partial_, at::Tensor()));
}

void Unit::run_or_queue(std::function<void()> work) {
  if (deferred_ && deferred_->queue) {
    deferred_->queue->push_back(std::move(work));
    return;
  }
  const at::NoGradGuard no_grad;
  work();
}

}  // namespace titanium
