// The choices that change what happens when, and never what comes out.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace titanium {

enum class Recompute : uint8_t { kNone, kFull, kEveryNth };
enum class Reshard : uint8_t {
  kDefault,  // give a unit back after a use, unless the prefetch would fetch it again at once (the head
             // between its forward and its backward)
  kAlways,   // give it back after every use
  kNever,    // gather once, give back at the end of the plan
};
enum class ReduceWhen : uint8_t { kLast, kEachMicroBatch };

struct PlanOptions {
  Recompute recompute = Recompute::kNone;
  int32_t recompute_every =
      2;  // kEveryNth: of the droppable blocks, counted from 1, every n-th is recomputed

  Reshard reshard_after_forward = Reshard::kDefault;
  int32_t prefetch = 1;  // how many blocks ahead a gather starts; 0: just before its use

  ReduceWhen reduce = ReduceWhen::kLast;
  int32_t pending_reduces = 2;  // reductions in flight at once; 0: as many as there are units

  int32_t pending_sends = 2;  // of a stage boundary and direction, in flight at once; 0: as many as there are

  int32_t offload_every = 0;  // every n-th droppable block offloads what its forward saved; 0: none

  // Passes to leave out, by name: "recompute", "offload", "unshard", "reduce".  Plans still run: without
  // `unshard` everything is gathered first and given back last; without `reduce` everything is reduced at the
  // end.
  std::vector<std::string> disabled_passes;
};

// BadConfig names the option, what was given, and what is allowed.
void validate(const PlanOptions& options);

}  // namespace titanium
