// Pipeline schedules: in which order each rank runs its stages on the micro-batches.  Compute alone, of whole
// stages: what blocks, transfers and weights do is added later (build.h, passes/).
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace titanium {

enum class StageKind : uint8_t {
  kForward,         // F
  kBackward,        // B: input and weight gradients
  kBackwardInput,   // I
  kBackwardWeight,  // W
};

struct StageAction {
  StageKind kind = StageKind::kForward;
  int32_t stage = 0, micro_batch = 0;
  bool operator==(const StageAction&) const = default;
};
std::string to_string(const StageAction& action);  // PyTorch's: "2F0"

struct PipelineOrder {
  std::vector<int32_t> rank_of;                 // [stages]
  std::vector<std::vector<StageAction>> ranks;  // what each rank runs, in order
  int32_t stages() const { return static_cast<int32_t>(rank_of.size()); }
};

// How stages lie on ranks.
enum class StagePlacement : uint8_t {
  kLoop,  // rank r has stages r, r + ranks, r + 2 ranks, ...
  kV,     // rank r has stages r and 2 ranks - 1 - r
};

// The schedules, under PyTorch's names.
struct PipelineSchedule {
  std::string_view name;
  StagePlacement placement;
  bool one_stage;  // of the model on each rank; else two or more, and exactly two for kV
};
// Any case.  BadConfig names the key, and lists the names.
const PipelineSchedule& pipeline_schedule(std::string_view name);

// Which rank has each of ranks * stages_per_rank stages.
std::vector<int32_t> place_stages(StagePlacement placement, int32_t ranks, int32_t stages_per_rank);

// The order of one of the schedules, for any number of micro-batches:
//   GPipe (Huang et al., 2018), 1F1B (Narayanan et al., 2019), Interleaved1F1B (Narayanan et al., 2021),
//   LoopedBFS (Lamy-Poirier, 2022), InterleavedZeroBubble and ZBVZeroBubble (Qi et al., 2023, 2024),
//   DualPipeV (DeepSeek, 2025; its overlapped pairs as a forward, then a backward).
// A schedule that is defined for some numbers only is made for the next of them, and the micro-batches that
// are not there are left out.  BadConfig when stages_per_rank does not fit the schedule.
PipelineOrder pipeline_order(std::string_view schedule, int32_t ranks, int32_t stages_per_rank,
                             int32_t micro_batches);

// The forwards alone, for a pass without gradients.
PipelineOrder forwards_of(const PipelineOrder& order);

// PyTorch's CSV: a line a rank, a cell an action ("2F0", "1I3", "(0F1;3B0)OVERLAP_F_B", empty for idle).
// Transfers and gathers (SEND_F, UNSHARD, ...) are left out: they are added anew.  Micro-batches from
// `micro_batches` on are left out too; where the file has fewer, its order is repeated for the next ones.
// BadConfig, with `file`, line and cell, for what cannot be read and for an order that is not complete or
// would never end.
PipelineOrder read_pipeline_csv(std::string_view text, std::string_view file, int32_t ranks,
                                int32_t micro_batches);

// When everything runs if each action starts as soon as its rank is free and what it needs is there, and
// transfers take no time.  Bug, with the first actions that wait for each other, when it never ends.
struct StageCosts {
  double forward = 1, backward_input = 1, backward_weight = 1;  // of a stage; a whole backward is both
};
struct PipelineTime {
  double total = 0;
  std::vector<double> busy;  // [ranks]
  double bubble() const;     // the share of the ranks' time in which they idle
};
PipelineTime time_pipeline(const PipelineOrder& order, const StageCosts& costs = {});

}  // namespace titanium
