// What the last pipeline stage has, on every rank: so callers need not know where the loss is.
#pragma once
#include <vector>

#include "titanium/dist/group.h"
#include "titanium/schedule/run.h"

namespace titanium {

// `ranks`: the pipeline; `last_rank` of them has the result, of one entry a batch, and the others get it.
// Statistics are of the dtype that goes with `compute`.
void share_result(const Group& ranks, int last_rank, const std::vector<PackedBatch>& batches,
                  at::ScalarType compute, WorkResult& result);

}  // namespace titanium
