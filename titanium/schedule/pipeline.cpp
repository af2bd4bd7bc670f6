#include "titanium/schedule/pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <deque>
#include <map>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr std::array<PipelineSchedule, 7> kSchedules = {{
    {"GPipe", StagePlacement::kLoop, true},
    {"1F1B", StagePlacement::kLoop, true},
    {"Interleaved1F1B", StagePlacement::kLoop, false},
    {"LoopedBFS", StagePlacement::kLoop, false},
    {"InterleavedZeroBubble", StagePlacement::kLoop, false},
    {"ZBVZeroBubble", StagePlacement::kV, false},
    {"DualPipeV", StagePlacement::kV, false},
}};

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

// What one rank runs.  The micro-batch of an action is the next one of its stage.
class RankOrder {
 public:
  explicit RankOrder(int32_t micro_batches) : micro_batches_(micro_batches) {}

  void forward(int32_t stage) { add(StageKind::kForward, stage, forwards_[stage]++); }
  void backward(int32_t stage) { add(StageKind::kBackward, stage, backwards_[stage]++); }
  void backward_input(int32_t stage) {
    const int32_t m = backwards_[stage]++;
    add(StageKind::kBackwardInput, stage, m);
    queue_.push_back({StageKind::kBackwardWeight, stage, m});
  }
  void weight() {  // the oldest that waits
    if (queue_.empty()) return;
    add(StageKind::kBackwardWeight, queue_.front().stage, queue_.front().micro_batch);
    queue_.pop_front();
  }
  void weight_of(int32_t stage) {  // the oldest of the stage
    const auto at =
        std::find_if(queue_.begin(), queue_.end(), [&](const StageAction& a) { return a.stage == stage; });
    if (at == queue_.end()) throw Bug("a pipeline schedule has no weight gradient of stage {} left", stage);
    add(StageKind::kBackwardWeight, stage, at->micro_batch);
    queue_.erase(at);
  }
  size_t weights_waiting() const { return queue_.size(); }
  int32_t forwards(int32_t stage) { return forwards_[stage]; }
  int32_t backwards(int32_t stage) { return backwards_[stage]; }

  void add(StageKind kind, int32_t stage, int32_t micro_batch) {
    if (micro_batch < micro_batches_) order_.push_back({kind, stage, micro_batch});
  }
  std::vector<StageAction> take() { return std::move(order_); }

 private:
  int32_t micro_batches_;  // beyond them nothing is there
  std::vector<StageAction> order_;
  std::map<int32_t, int32_t> forwards_, backwards_;
  std::deque<StageAction> queue_;
};

struct Numbers {
  int32_t rank, ranks, local, micro_batches;
};

// GPipe and LoopedBFS: all forwards of a stage, then of the next; backwards from the last stage on.
std::vector<StageAction> breadth_first(const Numbers& n, bool reversed) {
  RankOrder order(n.micro_batches);
  for (int32_t l = 0; l < n.local; ++l) {
    for (int32_t m = 0; m < n.micro_batches; ++m) order.forward(l * n.ranks + n.rank);
  }
  for (int32_t l = n.local - 1; l >= 0; --l) {
    for (int32_t m = 0; m < n.micro_batches; ++m) {
      order.add(StageKind::kBackward, l * n.ranks + n.rank, reversed ? n.micro_batches - 1 - m : m);
    }
  }
  return order.take();
}

// 1F1B, its interleaved form, and that with weight gradients put off: some forwards to fill the pipeline,
// then a forward and a backward in turn.  A rank goes through its stages in rounds of micro-batches.
// `ahead`: forwards more for each rank that comes after.
std::vector<StageAction> one_forward_one_backward(const Numbers& n, int32_t ahead, bool zero_bubble) {
  int32_t M = n.micro_batches;  // as many as go into rounds of one length
  while (M % std::max(1, M / n.ranks) != 0) ++M;
  const int32_t round = M / std::max(1, M / n.ranks), total = M * n.local;
  const int32_t warmup = std::min(total, (n.local - 1) * round + ahead * (n.ranks - 1 - n.rank));
  const auto stage_of = [&](int32_t step, bool backward) {
    const int32_t l = step / round % n.local;
    return (backward ? n.local - 1 - l : l) * n.ranks + n.rank;
  };
  RankOrder order(n.micro_batches);
  int32_t backwards = 0;
  const auto backward = [&] {
    const int32_t step = backwards++, stage = stage_of(step, true);
    if (!zero_bubble) return order.backward(stage);
    order.backward_input(stage);
    if (step >= n.rank) order.weight();
  };
  for (int32_t step = 0; step < total; ++step) {
    order.forward(stage_of(step, false));
    if (step >= warmup) backward();
  }
  while (backwards < total) backward();
  while (order.weights_waiting() > 0) order.weight();
  return order.take();
}

// Qi et al., "Pipeline parallelism with controllable memory", 2024 (ZB-V).
std::vector<StageAction> zbv(const Numbers& n) {
  const int32_t M = std::max(2 * n.ranks - 1, n.micro_batches);
  const int32_t down = n.rank, up = 2 * n.ranks - 1 - n.rank, after = n.ranks - n.rank;
  RankOrder order(n.micro_batches);
  const auto both = [&](int32_t stage) {
    order.backward_input(stage);
    order.weight_of(stage);
  };
  for (int32_t i = 0; i < 2 * after - 1; ++i) order.forward(down);
  for (int32_t i = 0; i < n.rank; ++i) {
    order.forward(up);
    order.forward(down);
  }
  for (int32_t i = 0; i < after; ++i) {
    order.forward(up);
    both(up);
  }
  while (order.forwards(up) < order.forwards(down) || order.forwards(down) < M) {
    if (order.forwards(down) < M) order.forward(down);
    both(down);
    order.forward(up);
    both(up);
  }
  for (int32_t i = 0; i < n.rank; ++i) {
    order.backward_input(down);
    order.backward_input(up);
  }
  for (int32_t i = 0; i < after; ++i) {
    order.backward_input(down);
    order.weight_of(down);
  }
  for (int32_t i = 0; i < n.rank; ++i) order.weight_of(up);
  while (order.weights_waiting() > 0) order.weight();
  return order.take();
}

// DeepSeek's DualPipeV: the steps of its published code.
std::vector<StageAction> dual_pipe_v(const Numbers& n) {
  const int32_t M = std::max(2 * n.ranks, n.micro_batches);
  const int32_t down = n.rank, up = 2 * n.ranks - 1 - n.rank, after = n.ranks - n.rank - 1;
  RankOrder order(n.micro_batches);
  for (int32_t i = 0; i < 2 * after; ++i) order.forward(down);
  for (int32_t i = 0; i <= n.rank; ++i) {
    order.forward(down);
    order.forward(up);
  }
  for (int32_t i = 0; i < after; ++i) {
    order.backward_input(up);
    order.weight();
    order.forward(up);
  }
  for (int32_t i = 0; i < M - 2 * n.ranks + n.rank + 1; ++i) {
    order.forward(down);
    order.backward(up);
    order.forward(up);
    order.backward(down);
  }
  for (int32_t i = 0; i < after; ++i) {
    order.backward(up);
    order.forward(up);
    order.backward(down);
  }
  bool put_off = false;  // weight gradients, for the second half
  const auto backward = [&](int32_t stage) { put_off ? order.backward_input(stage) : order.backward(stage); };
  for (int32_t i = 0; i <= n.rank; ++i) {
    const bool half = i == (n.rank + 1) / 2;
    put_off = put_off || (half && n.rank % 2 == 1);
    backward(up);
    put_off = put_off || half;
    backward(down);
  }
  for (int32_t i = 0; i < after; ++i) {
    order.weight();
    backward(down);
  }
  while (order.weights_waiting() > 0) order.weight();
  return order.take();
}

std::vector<StageAction> rank_order(std::string_view name, const Numbers& n) {
  if (name == "GPipe") return breadth_first(n, false);
  if (name == "LoopedBFS") return breadth_first(n, true);
  if (name == "1F1B") return one_forward_one_backward(n, 1, false);
  if (name == "Interleaved1F1B") return one_forward_one_backward(n, 2, false);
  if (name == "InterleavedZeroBubble") return one_forward_one_backward(n, 1, true);
  if (name == "ZBVZeroBubble") return zbv(n);
  if (name == "DualPipeV") return dual_pipe_v(n);
  throw Bug("no pipeline schedule {}", name);
}

}  // namespace

std::string to_string(const StageAction& action) {
  constexpr char kLetters[] = {'F', 'B', 'I', 'W'};
  return fmt::format("{}{}{}", action.stage, kLetters[static_cast<int>(action.kind)], action.micro_batch);
}

const PipelineSchedule& pipeline_schedule(std::string_view name) {
  std::string known;
  for (const PipelineSchedule& schedule : kSchedules) {
    if (lower(schedule.name) == lower(name)) return schedule;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", schedule.name);
  }
  throw BadConfig("pipeline_parallel_schedule = {}: allowed: {}", name, known);
}

std::vector<int32_t> place_stages(StagePlacement placement, int32_t ranks, int32_t stages_per_rank) {
  std::vector<int32_t> rank_of(static_cast<size_t>(ranks) * stages_per_rank);
  for (int32_t s = 0; s < static_cast<int32_t>(rank_of.size()); ++s) {
    rank_of[s] = placement == StagePlacement::kLoop || s < ranks ? s % ranks : 2 * ranks - 1 - s;
  }
  return rank_of;
}

PipelineOrder pipeline_order(std::string_view name, int32_t ranks, int32_t stages_per_rank,
                             int32_t micro_batches) {
  const PipelineSchedule& schedule = pipeline_schedule(name);
  if (ranks < 1 || micro_batches < 1) throw Bug("{} ranks, {} micro-batches", ranks, micro_batches);
  const bool fits = schedule.one_stage                         ? stages_per_rank == 1
                    : schedule.placement == StagePlacement::kV ? stages_per_rank == 2
                                                               : stages_per_rank >= 2;
  if (!fits) {
    throw BadConfig(
        "pipeline_parallel_schedule = {}: each rank has {} stage{} of the model; {} needs {} (see "
        "pipeline_parallel_layers_per_stage)",
        schedule.name, stages_per_rank, stages_per_rank == 1 ? "" : "s", schedule.name,
        schedule.one_stage                         ? "1"
        : schedule.placement == StagePlacement::kV ? "2"
                                                   : "2 or more");
  }
  PipelineOrder order{place_stages(schedule.placement, ranks, stages_per_rank), {}};
  for (int32_t rank = 0; rank < ranks; ++rank) {
    order.ranks.push_back(rank_order(schedule.name, {rank, ranks, stages_per_rank, micro_batches}));
  }
  return order;
}

PipelineOrder forwards_of(const PipelineOrder& order) {
  PipelineOrder result = order;
  for (auto& rank : result.ranks) {
    std::erase_if(rank, [](const StageAction& a) { return a.kind != StageKind::kForward; });
  }
  return result;
}

double PipelineTime::bubble() const {
  double work = 0;
  for (const double time : busy) work += time;
  return total > 0 ? 1 - work / (total * static_cast<double>(busy.size())) : 0;
}

PipelineTime time_pipeline(const PipelineOrder& order, const StageCosts& costs) {
  // When the output of an action was there: forwards, then input gradients.
  std::map<std::pair<int32_t, int32_t>, double> forward, backward;
  const size_t ranks = order.ranks.size();
  std::vector<size_t> next(ranks, 0);
  std::vector<double> free(ranks, 0);
  PipelineTime time;
  time.busy.assign(ranks, 0);
  // The moment from which an action may run, negative for not yet.
  const auto ready = [&](const StageAction& a) {
    const auto at = [&](const auto& done, int32_t stage) {
      const auto found = done.find({stage, a.micro_batch});
      return found == done.end() ? -1.0 : found->second;
    };
    switch (a.kind) {
      case StageKind::kForward:
        return a.stage == 0 ? 0.0 : at(forward, a.stage - 1);
      case StageKind::kBackwardWeight:
        return at(backward, a.stage);
      default: {
        const double own = at(forward, a.stage);
        const double from = a.stage + 1 == order.stages() ? own : at(backward, a.stage + 1);
        return own < 0 ? own : from < 0 ? from : std::max(own, from);
      }
    }
  };
  const auto cost = [&](StageKind kind) {
    switch (kind) {
      case StageKind::kForward:
        return costs.forward;
      case StageKind::kBackwardInput:
        return costs.backward_input;
      case StageKind::kBackwardWeight:
        return costs.backward_weight;
      default:
        return costs.backward_input + costs.backward_weight;
    }
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < ranks; ++r) {
      for (; next[r] < order.ranks[r].size(); ++next[r]) {
        const StageAction& a = order.ranks[r][next[r]];
        const double from = ready(a);
        if (from < 0) break;
        const double end = std::max(free[r], from) + cost(a.kind);
        free[r] = end;
        time.busy[r] += cost(a.kind);
        if (a.kind == StageKind::kForward) forward[{a.stage, a.micro_batch}] = end;
        if (a.kind == StageKind::kBackward || a.kind == StageKind::kBackwardInput)
          backward[{a.stage, a.micro_batch}] = end;
        moved = true;
      }
    }
  }
  std::string stuck;
  for (size_t r = 0; r < ranks; ++r) {
    if (next[r] < order.ranks[r].size())
      stuck +=
          fmt::format("{}rank {} at {}", stuck.empty() ? "" : ", ", r, to_string(order.ranks[r][next[r]]));
    time.total = std::max(time.total, free[r]);
  }
  if (!stuck.empty()) throw Bug("pipeline: ranks wait for each other: {}", stuck);
  return time;
}

}  // namespace titanium
