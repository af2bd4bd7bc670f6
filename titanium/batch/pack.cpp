#include "titanium/batch/pack.h"

#include <cmath>

namespace titanium {
namespace {

void check(const WeighedSample& w) {
  const size_t n = w.sample.ids.size();
  if (n == 0) throw BadData("sample {} is empty", w.sample.index);
  if (w.weight.size() != n || w.sample.loss_mask.size() != n) {
    throw BadData("sample {}: {} ids, but {} weights and a loss mask of {}", w.sample.index, n,
                  w.weight.size(), w.sample.loss_mask.size());
  }
  if (!(std::isfinite(w.sample.temperature) && w.sample.temperature > 0)) {
    throw BadData("sample {}: temperature {} is not finite and > 0", w.sample.index, w.sample.temperature);
  }
}

void add_filler(PackedBatch& batch, int64_t tokens, int32_t token, bool with_temperature) {
  for (int64_t p = 0; p < tokens; ++p) {
    batch.tokens.push_back(token);
    batch.positions.push_back(p);
    batch.labels.push_back(kNoLabel);
    batch.weight.push_back(0);
    if (with_temperature) batch.temperature.push_back(1);
  }
  batch.bounds.push_back(batch.size());
  batch.seq_weight.push_back(0);
  batch.sample.push_back(kFiller);
}

// The budget rounded down to a multiple of the padding, so that a filler never goes beyond it.
SplitOptions with_room_for_filler(const PackOptions& options) {
  if (options.pad_to_multiple < 1) {
    throw BadConfig("the tokens of a micro-batch cannot be a multiple of {}; > 0 is allowed",
                    options.pad_to_multiple);
  }
  SplitOptions split = options.split;
  split.budget -= split.budget % options.pad_to_multiple;
  if (split.budget < 1) {
    throw BadConfig("{} = {} is less than {}, of which the tokens of a micro-batch are a multiple",
                    split.budget_key, options.split.budget, options.pad_to_multiple);
  }
  return split;
}

}  // namespace

PackedBatch pack_one(std::span<const WeighedSample* const> samples, int64_t pad_to_multiple,
                     int32_t filler_token) {
  if (pad_to_multiple < 1) throw BadConfig("cannot pad to a multiple of {}; > 0 is allowed", pad_to_multiple);
  PackedBatch batch;
  size_t total = 0;
  bool with_temperature = false;
  for (const WeighedSample* w : samples) {
    check(*w);
    total += w->sample.ids.size();
    with_temperature = with_temperature || w->sample.temperature != 1;
  }
  total += static_cast<size_t>(pad_to_multiple);
  batch.tokens.reserve(total);
  batch.positions.reserve(total);
  batch.labels.reserve(total);
  batch.weight.reserve(total);
  if (with_temperature) batch.temperature.reserve(total);
  batch.bounds.push_back(0);
  for (const WeighedSample* w : samples) {
    const Sample& sample = w->sample;
    for (size_t i = 0; i < sample.ids.size(); ++i) {
      const bool last = i + 1 == sample.ids.size();
      batch.tokens.push_back(sample.ids[i]);
      batch.positions.push_back(static_cast<int64_t>(i));
      batch.labels.push_back(last ? kNoLabel : sample.ids[i + 1]);
      batch.weight.push_back(last ? 0 : w->weight[i]);
      if (with_temperature) batch.temperature.push_back(sample.temperature);
    }
    batch.bounds.push_back(batch.size());
    batch.seq_weight.push_back(w->seq_weight);
    batch.sample.push_back(sample.index);
  }
  const int64_t over = batch.size() % pad_to_multiple;
  if (batch.size() == 0 || over != 0) {
    add_filler(batch, pad_to_multiple - over, filler_token, with_temperature);
  }
  return batch;
}

std::vector<PackedBatch> pack(std::span<const WeighedSample> samples, const PackOptions& options) {
  std::vector<int64_t> lengths;
  lengths.reserve(samples.size());
  for (const WeighedSample& w : samples) {
    check(w);
    lengths.push_back(w.sample.size());
  }
  return pack(samples, micro_batches(std::span<const int64_t>(lengths), with_room_for_filler(options)),
              options);
}

std::vector<PackedBatch> pack(std::span<const WeighedSample> samples, const Groups& groups,
                              const PackOptions& options) {
  const int64_t budget = with_room_for_filler(options).budget;
  std::vector<PackedBatch> out;
  out.reserve(groups.size());
  std::vector<char> placed(samples.size(), 0);
  for (const auto& group : groups) {
    std::vector<const WeighedSample*> members;
    members.reserve(group.size());
    for (int64_t i : group) {
      if (i < 0 || i >= static_cast<int64_t>(samples.size())) {
        throw Bug("pack: a group names sample {} of {}", i, samples.size());
      }
      if (placed[static_cast<size_t>(i)]++) throw Bug("pack: sample {} is in two groups", i);
      members.push_back(&samples[static_cast<size_t>(i)]);
    }
    out.push_back(pack_one(members, options.pad_to_multiple, options.filler_token));
    if (out.back().size() > budget) {
      throw Bug("pack: a group has {} tokens, more than {} = {}", out.back().size(), options.split.budget_key,
                budget);
    }
  }
  const auto lost = std::find(placed.begin(), placed.end(), 0);
  if (lost != placed.end()) throw Bug("pack: sample {} is in no group", lost - placed.begin());
  return out;
}

}  // namespace titanium
