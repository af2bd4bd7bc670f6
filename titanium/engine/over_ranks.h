// What the data ranks of an engine tell each other about one call.
#pragma once
#include <functional>
#include <vector>

#include "titanium/batch/packed_batch.h"
#include "titanium/batch/weights.h"
#include "titanium/dist/group.h"
#include "titanium/loss/report.h"

namespace titanium {

Counts sum_over(const Group& group, const Counts& own);

// Metrics of all ranks, added up in rank order; a metric that a rank lacks counts as one of nothing.
Reports sum_over(const Group& group, const Reports& own);

// Micro-batches, as many on every rank of the group: `cut(n)` gives this rank's, at least n of them and the
// fewest that it can; what it cannot fill holds a filler alone, of `filler_tokens`.  None where no rank has
// any.
std::vector<PackedBatch> equal_in_number(const Group& group,
                                         const std::function<std::vector<PackedBatch>(int64_t at_least)>& cut,
                                         int64_t filler_tokens);

}  // namespace titanium
