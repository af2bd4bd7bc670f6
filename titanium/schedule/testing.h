// Models and options for the tests of plans.
#pragma once
#include <string>
#include <string_view>

#include "titanium/schedule/options.h"
#include "titanium/schedule/part.h"

namespace titanium {

struct PlanCase {
  PlanTask task;
  PlanOptions options;
};

// Reads the head of a golden file: lines `#: key value`.
//   #: blocks embed:0 layer:1 layer:2,3 head:0     units of each block; layers are droppable
//   #: frozen 1 3                                  units without gradient
//   #: micro_batches 2, forward_only, recompute none|full|<n>, reshard default|always|never, prefetch <n>,
//   #: reduce last|each_micro_batch, pending_reduces <n>, offload <n>, disabled <pass> <pass>: a line each
PlanCase read_case(std::string_view text);

// An embedding, `layers` layers, and a head, a unit each; tied: embedding and head share unit 0.
ModelPart dense(int32_t layers, bool tied = false);

// Any sizes and options that are allowed, small enough for thousands of them.
PlanCase random_case(uint64_t seed);

std::string describe(const PlanCase& plan_case);  // for the message of a failing test

}  // namespace titanium
