#include "titanium/shard/param_store.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <map>

#include "titanium/base/error.h"
#include "titanium/base/random.h"

namespace titanium {

ParamStore::ParamStore(WeightTable& table, int blocks, StoreOptions options)
    : table_(table), options_(std::move(options)), block_units_(blocks) {
  place_units(blocks);
  const auto pool = std::make_shared<BufferPool>();
  const int own = mesh().at().pp;
  for (UnitPlace& place : places_) {
    if (!place.pps.empty() && std::find(place.pps.begin(), place.pps.end(), own) == place.pps.end()) continue;
    const TpPart& part = place.weights[0]->parts()[place.weights[0]->tp()];
    const int index = static_cast<int>(units_.size());
    units_.push_back(std::make_unique<Unit>(
        place.name, place.weights, place.trainable, options_.dtypes,
        UnitGroups{mesh().replicas(part.holders_begin, part.holders_end, place.pps), mesh().replicate()},
        pool, deferred_));
    place.unit = units_.back().get();
    for (const int block : place.blocks) {
      if (options_.pp_of_block.empty() || options_.pp_of_block.at(block) == own)
        block_units_[block].push_back(index);
    }
  }
}

void ParamStore::place_units(int blocks) {
  const auto add = [&](const std::string& name, std::vector<Weight*> weights, bool trainable,
                       std::vector<int> users) {
    UnitPlace place{name, std::move(weights), trainable, std::move(users), {}, nullptr};
    for (const int block : place.blocks) {
      if (!options_.pp_of_block.empty()) place.pps.push_back(options_.pp_of_block.at(block));
    }
    std::sort(place.pps.begin(), place.pps.end());
    place.pps.erase(std::unique(place.pps.begin(), place.pps.end()), place.pps.end());
    places_.push_back(std::move(place));
  };
  for (int block = 0; block < blocks; ++block) {
    // Weights that train alike and whose parts the same ranks hold, on every tensor-parallel coordinate: so
    // all ranks have the same units.
    struct Kind {
      bool frozen;
      std::vector<std::pair<int, int>> holders;
      bool operator==(const Kind&) const = default;
    };
    std::vector<std::pair<Kind, std::vector<Weight*>>> kinds;
    for (const auto& weight : table_.weights()) {
      if (weight->block() != block) continue;
      const bool frozen = options_.frozen && options_.frozen(weight->name());
      if (weight->shared()) {
        std::vector<int> users{block};
        for (const auto& use : table_.second_uses()) {
          if (use.weight == weight.get()) users.push_back(use.block);
        }
        add(weight->name(), {weight.get()}, !frozen, users);
        continue;
      }
      Kind kind{frozen, {}};
      for (const TpPart& part : weight->parts())
        kind.holders.emplace_back(part.holders_begin, part.holders_end);
      auto known = std::find_if(kinds.begin(), kinds.end(), [&](const auto& k) { return k.first == kind; });
      if (known == kinds.end()) known = kinds.insert(kinds.end(), {kind, {}});
      known->second.push_back(weight.get());
    }
    std::stable_sort(kinds.begin(), kinds.end(),
                     [](const auto& a, const auto& b) { return a.first.frozen < b.first.frozen; });
    for (const auto& [kind, weights] : kinds) {
      const bool several = std::count_if(kinds.begin(), kinds.end(),
                                         [&](const auto& k) { return k.first.frozen == kind.frozen; }) > 1;
      const std::string of = several ? fmt::format(" from {}", weights[0]->name()) : "";
      add(fmt::format("block {}{}{}", block, of, kind.frozen ? " (frozen)" : ""), weights, !kind.frozen,
          {block});
    }
  }
}

bool ParamStore::whole() const {
  return std::all_of(units_.begin(), units_.end(), [](const auto& unit) { return unit->whole(); });
}

UnitSize ParamStore::size_of(const UnitPlace& place) const {
  const int tp = place.weights[0]->tp();
  const TpPart& part = place.weights[0]->parts()[tp];
  const ParallelDims& dims = mesh().dims();
  const int replicas = dims.dp_shard * dims.cp * (part.holders_end - part.holders_begin) *
                       std::max<int>(1, static_cast<int>(place.pps.size()));
  const UnitLayout layout(place.weights, tp, replicas);
  return {layout.numel, layout.part, replicas};
}

std::vector<Slice> ParamStore::slices_of(const Coordinates& at) const {
  struct Lies {  // a weight, in the unit as that rank has it
    int64_t offset, first, part;
    Unit* unit;
  };
  std::map<const Weight*, Lies> lies;
  const ParallelDims& dims = mesh().dims();
  const int rank = rank_of(dims, at);
  for (const UnitPlace& place : places_) {
    if (!place.pps.empty() && std::find(place.pps.begin(), place.pps.end(), at.pp) == place.pps.end())
      continue;
    const TpPart& part = place.weights[0]->parts()[at.tp];
    const std::vector<int> ranks = replica_ranks(dims, rank, part.holders_begin, part.holders_end, place.pps);
    const UnitLayout layout(place.weights, at.tp, static_cast<int>(ranks.size()));
    const auto index = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    for (size_t i = 0; i < layout.offsets.size(); ++i)
      lies[place.weights[i]] = {layout.offsets[i], layout.part * index, layout.part, place.unit};
  }
  std::vector<Slice> all;
  for (const auto& weight : table_.weights()) {
    const auto found = lies.find(weight.get());
    if (found == lies.end()) continue;
    const auto& [offset, first, part, unit] = found->second;
    const int64_t begin = std::max(offset, first);
    const int64_t end = std::min(offset + weight->local_numel(at.tp), first + part);
    if (begin >= end) continue;
    all.push_back({weight.get(), unit, at.tp, begin - offset, end - offset, begin - first});
  }
  return all;
}

void Slice::each_run(const std::function<void(const Run&)>& visit) const {
  const TpPart& part = weight->parts()[tp];
  if (weight->split() != Split::kCols) {
    visit({global_index(0), 0, count()});
    return;
  }
  const int64_t width = part.end - part.begin;
  for (int64_t at = begin; at < end;) {
    const int64_t row_end = std::min(end, (at / width + 1) * width);
    visit({global_index(at - begin), at - begin, row_end - at});
    at = row_end;
  }
}

int64_t Slice::global_index(int64_t i) const {
  const TpPart& part = weight->parts()[tp];
  const int64_t at = begin + i;
  if (part.begin == 0 && weight->split() != Split::kCols) return at;  // a number has no rows
  if (weight->split() == Split::kRows) return part.begin * (weight->numel() / weight->shape()[0]) + at;
  const int64_t width = part.end - part.begin;
  return at / width * weight->shape()[1] + part.begin + at % width;
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
        at::Tensor values = at::empty({slice.count()}, at::kDouble);
        double* out = values.data_ptr<double>();
        at::parallel_for(0, slice.count(), 4096, [&](int64_t from, int64_t to) {
          for (int64_t i = from; i < to; ++i) {
            out[i] = weight.init().std * random.normal(static_cast<uint64_t>(slice.global_index(i)));
          }
        });
        target.copy_(values);
      }
    }
  }
  for (const UnitPlace& place : places_) {
    if (place.unit && (!which || std::any_of(place.weights.begin(), place.weights.end(),
                                             [&](const Weight* weight) { return which(*weight); })))
      place.unit->written();
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

void ParamStore::release_casts() {
  for (const auto& unit : units_) unit->reshard(/*keep_memory=*/false);
}

}  // namespace titanium
