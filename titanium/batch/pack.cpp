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
  if (!is_temperature(w.sample.temperature)) {
    throw BadData("sample {}: temperature {} is not finite and > 0 (at least {})", w.sample.index,
                  w.sample.temperature, kLeastTemperature);
  }
  for (const auto& [name, column] : w.sample.columns) {
    if (column.size() != n) {
      throw BadData("sample {}: {} ids, but column '{}' has {} entries", w.sample.index, n, name,
                    column.size());
    }
  }
}

template <typename Column>
void check_names(const std::map<std::string, Column>& first, const std::map<std::string, Column>& other,
                 int64_t index) {
  for (const auto& [name, column] : first) {
    if (!other.contains(name)) throw BadData("sample {} lacks column '{}' that others have", index, name);
  }
  for (const auto& [name, column] : other) {
    if (!first.contains(name)) throw BadData("sample {} has column '{}' that others lack", index, name);
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
  for (auto& [name, column] : batch.columns) column.resize(batch.tokens.size(), 0.0);
  for (auto& [name, column] : batch.seq_columns) column.push_back(0);
  batch.bounds.push_back(batch.size());
  batch.seq_weight.push_back(0);
  batch.row_weight.push_back(0);
  batch.sample.push_back(kFiller);
  batch.group.push_back(-1);
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

void check_uncut(const std::vector<PackedBatch>& batches) {
  std::map<int64_t, size_t> where;
  for (size_t b = 0; b < batches.size(); ++b) {
    for (int64_t group : batches[b].group) {
      if (group < 0) continue;
      const size_t first = where.emplace(group, b).first->second;
      if (first != b) {
        throw BadData("group {} is cut: it has samples in micro-batches {} and {}", group, first, b);
      }
    }
  }
}

}  // namespace

Groups keep_together(std::span<const WeighedSample> samples, bool keep_groups) {
  Groups out;
  std::map<int64_t, size_t> where;
  for (size_t i = 0; i < samples.size(); ++i) {
    const int64_t group = keep_groups ? samples[i].sample.group : -1;
    size_t place = out.size();
    if (group >= 0) place = where.emplace(group, place).first->second;
    if (place == out.size()) out.emplace_back();
    out[place].push_back(static_cast<int64_t>(i));
  }
  return out;
}

PackedBatch pack_one(std::span<const WeighedSample* const> samples, int64_t pad_to_multiple,
                     int32_t filler_token) {
  if (pad_to_multiple < 1) throw BadConfig("cannot pad to a multiple of {}; > 0 is allowed", pad_to_multiple);
  PackedBatch batch;
  size_t total = 0;
  bool with_temperature = false;
  for (const WeighedSample* w : samples) {
    check(*w);
    check_names(samples[0]->sample.columns, w->sample.columns, w->sample.index);
    check_names(samples[0]->sample.seq_columns, w->sample.seq_columns, w->sample.index);
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
    for (const auto& [name, column] : sample.columns) {
      auto& to = batch.columns[name];
      to.insert(to.end(), column.begin() + 1, column.end());
      to.push_back(0);
    }
    for (const auto& [name, value] : sample.seq_columns) batch.seq_columns[name].push_back(value);
    batch.bounds.push_back(batch.size());
    batch.seq_weight.push_back(w->seq_weight);
    batch.row_weight.push_back(w->row_weight);
    batch.sample.push_back(sample.index);
    batch.group.push_back(sample.group);
  }
  const int64_t over = batch.size() % pad_to_multiple;
  if (batch.size() == 0 || over != 0) {
    add_filler(batch, pad_to_multiple - over, filler_token, with_temperature);
  }
  return batch;
}

Groups groups_of(std::span<const WeighedSample> samples, const PackOptions& options) {
  const SplitOptions split = with_room_for_filler(options);
  const Groups together = keep_together(samples, options.keep_groups);
  std::vector<int64_t> lengths;
  lengths.reserve(together.size());
  for (const auto& members : together) {
    int64_t tokens = 0;
    for (int64_t i : members) {
      const WeighedSample& w = samples[static_cast<size_t>(i)];
      check(w);
      tokens += w.sample.size();
    }
    if (members.size() > 1 && tokens > split.budget) {
      throw BadData("group {} has {} tokens in {} samples, which stay together: more than {} = {}",
                    samples[static_cast<size_t>(members[0])].sample.group, tokens, members.size(),
                    split.budget_key, split.budget);
    }
    lengths.push_back(tokens);
  }
  Groups groups;
  for (const auto& units : micro_batches(std::span<const int64_t>(lengths), split)) {
    std::vector<int64_t> group;
    for (int64_t unit : units) {
      const auto& members = together[static_cast<size_t>(unit)];
      group.insert(group.end(), members.begin(), members.end());
    }
    std::sort(group.begin(), group.end());
    groups.push_back(std::move(group));
  }
  return groups;
}

std::vector<PackedBatch> pack(std::span<const WeighedSample> samples, const PackOptions& options) {
  return pack(samples, groups_of(samples, options), options);
}

std::vector<PackedBatch> pack(std::span<const WeighedSample> samples, const Groups& groups,
                              const PackOptions& options) {
  const int64_t budget = with_room_for_filler(options).budget;
  for (const WeighedSample& w : samples) {  // of all: what a loss finds must not depend on the cut
    check_names(samples[0].sample.columns, w.sample.columns, w.sample.index);
    check_names(samples[0].sample.seq_columns, w.sample.seq_columns, w.sample.index);
  }
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
  if (options.keep_groups) check_uncut(out);
  return out;
}

}  // namespace titanium
