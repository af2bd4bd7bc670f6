// Lays weighed samples end to end in micro-batches, and takes per-token outputs back to the samples.
#pragma once
#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/batch/packed_batch.h"
#include "titanium/batch/partition.h"
#include "titanium/batch/weights.h"

namespace titanium {

constexpr int64_t kFiller = -1;  // PackedBatch::sample of the filler document

struct PackOptions {
  SplitOptions split;
  // Every micro-batch's T is a multiple of this (tensor and context parallelism cut it), made so by one
  // filler document at the end: weight 0, no labels, sample kFiller.  It counts in the budget.
  int64_t pad_to_multiple = 1;
  int32_t filler_token = 0;
  // Samples of one Sample::group >= 0 stay in one micro-batch, for a loss that must not be cut below a group.
  bool keep_groups = false;
};

// Indices of samples that must stay together: one list a group, one a sample without group, in the order of
// their first sample.  All lists have one index unless keep_groups.
Groups keep_together(std::span<const WeighedSample> samples, bool keep_groups);

// One micro-batch of the given samples, in the given order, as one document each.  Without samples it holds a
// filler alone.  Positions restart and labels end with each document: documents never see each other.
// All samples have the same columns.
// BadData: an empty sample, arrays of different lengths, a temperature that is not finite and > 0, a column
// that one sample has and another lacks.
PackedBatch pack_one(std::span<const WeighedSample* const> samples, int64_t pad_to_multiple = 1,
                     int32_t filler_token = 0);

// Which samples form which micro-batch, as pack() has it.  See micro_batches() for the rule and the errors.
Groups groups_of(std::span<const WeighedSample> samples, const PackOptions& options);

// Micro-batches of this rank's samples; which sample is where is in PackedBatch::sample.  See micro_batches()
// for the rule and the errors; a group that is kept together counts as one long sequence.  No samples give no
// micro-batch.
std::vector<PackedBatch> pack(std::span<const WeighedSample> samples, const PackOptions& options);
// The same from groups made before, as by micro_batches() over all ranks.  Bug: groups that do not hold every
// sample once within the budget.  BadData: they cut a group that options keep together; a column that one
// sample has and another lacks.
std::vector<PackedBatch> pack(std::span<const WeighedSample> samples, const Groups& groups,
                              const PackOptions& options);

// Per-token outputs of micro-batches ([T] each) as rows of samples: row i has the n values of the sample
// whose index is samples[i], whatever micro-batch it was in.  Fillers are left out.  Bug: an output of
// another length than its batch, or a sample that is missing or there twice.
template <typename T>
std::vector<std::vector<T>> unpack(std::span<const PackedBatch> batches,
                                   std::span<const std::vector<T>> outputs,
                                   std::span<const int64_t> samples) {
  if (batches.size() != outputs.size()) {
    throw Bug("unpack: {} outputs for {} micro-batches", outputs.size(), batches.size());
  }
  std::map<int64_t, std::vector<T>> rows;
  for (size_t b = 0; b < batches.size(); ++b) {
    const PackedBatch& batch = batches[b];
    if (static_cast<int64_t>(outputs[b].size()) != batch.size()) {
      throw Bug("unpack: micro-batch {} has {} tokens but {} outputs", b, batch.size(), outputs[b].size());
    }
    for (int64_t d = 0; d < batch.documents(); ++d) {
      const int64_t sample = batch.sample[static_cast<size_t>(d)];
      if (sample == kFiller) continue;
      const auto begin = outputs[b].begin() + batch.bounds[static_cast<size_t>(d)];
      const auto end = outputs[b].begin() + batch.bounds[static_cast<size_t>(d) + 1];
      if (!rows.emplace(sample, std::vector<T>(begin, end)).second) {
        throw Bug("unpack: sample {} is in two documents", sample);
      }
    }
  }
  std::vector<std::vector<T>> out;
  out.reserve(samples.size());
  for (int64_t sample : samples) {
    const auto row = rows.find(sample);
    if (row == rows.end()) throw Bug("unpack: sample {} is in no micro-batch, or asked for twice", sample);
    out.push_back(std::move(row->second));
    rows.erase(row);
  }
  return out;
}

}  // namespace titanium
