// What the ranks of an engine tell each other about one call.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "titanium/batch/packed_batch.h"
#include "titanium/batch/weights.h"
#include "titanium/dist/mesh.h"
#include "titanium/loss/report.h"

namespace titanium {

// What the ranks learn of each other before a batch is cut.
struct GlobalBatch {
  Counts counts;      // of all data ranks
  int64_t first = 0;  // samples of the data ranks before this one
};
// `arguments`, lines of "key = value", must be the same on all ranks, and the samples on the ranks of a
// model-parallel group.  BadConfig, on all ranks, names a rank that differs, and the line.
GlobalBatch meet(const Mesh& mesh, const std::string& arguments, const std::vector<Sample>& samples);

// Metrics of all ranks, added up in rank order; a metric that a rank lacks counts as one of nothing.
Reports sum_over(const Group& group, const Reports& own);

// Micro-batches, as many on every rank of the group: `cut(n)` gives this rank's, at least n of them and the
// fewest that it can; what it cannot fill holds a filler alone, of `filler_tokens`.  None where no rank has
// any.
std::vector<PackedBatch> equal_in_number(const Group& group,
                                         const std::function<std::vector<PackedBatch>(int64_t at_least)>& cut,
                                         int64_t filler_tokens);

}  // namespace titanium
