#include "titanium/shard/param_store.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/base/random.h"

namespace titanium {

ParamStore::ParamStore(WeightTable& table, int blocks, StoreOptions options)
    : table_(table), options_(std::move(options)), block_units_(blocks) {
  const auto frozen = [&](const Weight& w) { return options_.frozen && options_.frozen(w.name()); };
  const auto add_unit = [&](std::string name, std::vector<Weight*> weights, bool trainable, int block) {
    block_units_[block].push_back(static_cast<int>(units_.size()));
    units_.push_back(std::make_unique<Unit>(std::move(name), std::move(weights), trainable, options_.dtypes,
                                            options_.replicas));
  };
  for (int block = 0; block < blocks; ++block) {
    std::vector<Weight*> trained, kept;
    for (const auto& weight : table_.weights()) {
      if (weight->block() != block) continue;
      if (weight->shared()) {
        const int unit = static_cast<int>(units_.size());
        add_unit(weight->name(), {weight.get()}, !frozen(*weight), block);
        for (const auto& use : table_.second_uses()) {
          if (use.weight == weight.get()) block_units_[use.block].push_back(unit);
        }
      } else {
        (frozen(*weight) ? kept : trained).push_back(weight.get());
      }
    }
    if (!trained.empty()) add_unit(fmt::format("block {}", block), trained, true, block);
    if (!kept.empty()) add_unit(fmt::format("block {} (frozen)", block), kept, false, block);
  }
}

std::vector<Slice> ParamStore::slices() const {
  std::vector<Slice> all;
  for (const auto& weight : table_.weights()) {
    Unit& unit = weight->unit();
    const int64_t part = unit.shard().numel();
    const int64_t first = part * options_.replicas.rank();  // this rank's part of the unit
    const int64_t begin = std::max(weight->offset(), first);
    const int64_t end = std::min(weight->offset() + weight->numel(), first + part);
    if (begin >= end) continue;
    all.push_back({weight.get(), &unit, begin - weight->offset(), end - weight->offset(), begin - first});
  }
  return all;
}

const Weight& ParamStore::weight(const std::string& name) const {
  const Weight* weight = table_.find(name);
  if (!weight) throw Bug("the model has no weight '{}'", name);
  return *weight;
}

int64_t ParamStore::parameters() const {
  int64_t n = 0;
  for (const auto& weight : table_.weights()) n += weight->numel();
  return n;
}

void ParamStore::init(uint64_t seed, const std::function<bool(const Weight&)>& which) {
  const at::NoGradGuard no_grad;
  for (const Slice& slice : slices()) {
    if (which && !which(*slice.weight)) continue;
    before_write(*slice.unit);
    at::Tensor target = slice.of(slice.unit->shard());
    const Weight& weight = *slice.weight;
    switch (weight.init().kind) {
      case Init::kOnes:
        target.fill_(1);
        break;
      case Init::kZeros:
        target.zero_();
        break;
      case Init::kNormal: {
        const Random random(seed, Purpose::kInit, hash_name(weight.name().data(), weight.name().size()));
        at::Tensor values = at::empty({slice.end - slice.begin}, at::kDouble);
        double* out = values.data_ptr<double>();
        at::parallel_for(0, slice.end - slice.begin, 4096, [&](int64_t from, int64_t to) {
          for (int64_t i = from; i < to; ++i) {
            out[i] = weight.init().std * random.normal(static_cast<uint64_t>(slice.begin + i));
          }
        });
        target.copy_(values);
      }
    }
    slice.unit->written();
  }
}

std::shared_ptr<const void> ParamStore::hold(std::string reader) {
  std::erase_if(readers_, [](const auto& held) { return held.expired(); });
  auto held = std::make_shared<const std::string>(std::move(reader));
  readers_.push_back(held);
  return held;
}

void ParamStore::check_free() const {
  for (const auto& held : readers_) {
    if (const auto reader = held.lock()) {
      throw BadConfig("the weights cannot change while {} is open: take it to its end or close it first",
                      *reader);
    }
  }
}

int64_t ParamStore::stream_version(std::optional<int64_t> wanted) {
  const int64_t version = wanted.value_or(stream_version_ + 1);
  stream_version_ = std::max(stream_version_, version);
  return version;
}

void ParamStore::zero_grad() {
  for (const auto& unit : units_) unit->zero_grad();
}

void ParamStore::release_grad() {
  for (const auto& unit : units_) unit->release_grad();
}

}  // namespace titanium
