#include "titanium/schedule/simulate.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// A transfer between ranks: when each of them has started it, and when it ends.
struct Meeting {
  size_t present = 0;
  double latest = 0;
  std::optional<TimedAction> span;
};

class Simulation {
 public:
  Simulation(const std::vector<Plan>& plans, const std::vector<PlanTask>& tasks,
             const std::vector<PlanCosts>& costs)
      : plans_(plans), tasks_(tasks), costs_(costs), at_(plans.size(), 0), now_(plans.size(), 0) {
    timeline_.ranks.resize(plans.size());
    for (const PlanTask& task : tasks) {
      for (const PlanUnit& unit : task.part.units) {
        if (unit.spans >= 0) ++sharers_[unit.spans];
      }
    }
  }

  Timeline run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < plans_.size(); ++rank) {
        while (at_[rank] < plans_[rank].size() && step(rank)) moved = true;
      }
    }
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      if (at_[rank] < plans_[rank].size()) {
        throw Bug("simulate: rank {} waits for ever at '{}'", rank, to_string(plans_[rank][at_[rank]]));
      }
      timeline_.seconds = std::max(timeline_.seconds, now_[rank]);
    }
    // The norm is of all ranks, so nobody updates before the last one is there.
    double update = 0;
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      Timeline::Rank& r = timeline_.ranks[rank];
      r.actions.push_back({-1, timeline_.seconds, timeline_.seconds + costs_[rank].update, false});
      update = std::max(update, costs_[rank].update);
      std::stable_sort(r.actions.begin(), r.actions.end(),
                       [](const TimedAction& a, const TimedAction& b) { return a.start < b.start; });
    }
    timeline_.seconds += update;
    return std::move(timeline_);
  }

 private:
  using Channel = std::tuple<int, int32_t, int32_t>;  // kind, stage or unit, rank
  using Key = std::tuple<int, int32_t, int32_t>;      // kind, stage or unit, micro-batch

  // False where the rank has to wait for another.
  bool step(size_t rank) {
    const Action& a = plans_[rank][at_[rank]];
    const PlanCosts& cost = costs_[rank];
    bool done = true;
    switch (a.kind) {
      case Kind::kUnshard:
      case Kind::kReduce:
        done = of_unit(rank, a);
        break;
      case Kind::kReshard:
        break;
      case Kind::kForward:
      case Kind::kRecompute:
        compute(rank, cost.blocks[a.block].forward);
        break;
      case Kind::kBackward:
        compute(rank, cost.blocks[a.block].backward_input + cost.blocks[a.block].backward_weight);
        break;
      case Kind::kBackwardInput:
        compute(rank, cost.blocks[a.block].backward_input);
        break;
      case Kind::kBackwardWeight:
        compute(rank, cost.blocks[a.block].backward_weight);
        break;
      case Kind::kLoss:
        compute(rank, cost.loss);
        break;
      case Kind::kSendOutput:
      case Kind::kRecvInput:
      case Kind::kSendInputGrad:
      case Kind::kRecvOutputGrad:
        done = between_stages(rank, a);
        break;
      case Kind::kOffload:
      case Kind::kOnload:
        break;  // on one device nothing moves
    }
    if (done) ++at_[rank];
    return done;
  }

  void compute(size_t rank, double seconds) {
    seconds += costs_[rank].action;
    const double start = now_[rank];
    now_[rank] += seconds;
    timeline_.ranks[rank].busy += seconds;
    timeline_.ranks[rank].actions.push_back({static_cast<int64_t>(at_[rank]), start, now_[rank], false});
  }

  void record(size_t rank, const TimedAction& span) {
    timeline_.ranks[rank].actions.push_back({static_cast<int64_t>(at_[rank]), span.start, span.end, true});
  }

  bool of_unit(size_t rank, const Action& a) {
    const PlanCosts::Unit& cost = costs_[rank].units[a.unit];
    const bool unshard = a.kind == Kind::kUnshard;
    const double seconds = unshard ? cost.unshard : cost.reduce;
    if (unshard && a.half != Half::kWait && cost.cast > 0) compute(rank, cost.cast);
    if (seconds == 0) {  // nothing is moved
      if (!unshard && a.half != Half::kStart && cost.add > 0) compute(rank, cost.add);
      return true;
    }
    if (!moves(rank, a, seconds)) return false;
    if (!unshard && a.half != Half::kStart && cost.add > 0) compute(rank, cost.add);
    return true;
  }

  bool moves(size_t rank, const Action& a, double seconds) {
    const int32_t spans = tasks_[rank].part.units[a.unit].spans;
    const int kind = static_cast<int>(a.kind);
    const auto r = static_cast<int32_t>(rank);
    const bool alone = spans < 0;
    const Key key = alone ? Key{kind, a.unit, -1 - r} : Key{kind, spans, 0};
    // All units of a rank share the group of its replicas, and so its channel; one that spans has its own.
    const Channel channel = alone ? Channel{-1, 0, r} : Channel{-2, spans, 0};
    return meet(rank, a, key, channel, alone ? 1 : sharers_[spans], seconds);
  }

  bool between_stages(size_t rank, const Action& a) {
    const int32_t stage = tasks_[rank].part.stage_of(a.block).index;
    const bool gradient = a.kind == Kind::kSendInputGrad || a.kind == Kind::kRecvOutputGrad;
    const bool at_end = a.kind == Kind::kSendOutput || a.kind == Kind::kRecvOutputGrad;
    const int32_t boundary = at_end ? stage : stage - 1;
    const int kind = gradient ? -4 : -3;
    return meet(rank, a, {kind, boundary, a.micro_batch}, {kind, boundary, 0}, 2,
                costs_[rank].blocks[a.block].transfer);
  }

  bool meet(size_t rank, const Action& a, const Key& key, const Channel& channel, size_t needed,
            double seconds) {
    if (a.half != Half::kWait && !started_[{key, static_cast<int32_t>(rank)}]) {
      started_[{key, static_cast<int32_t>(rank)}] = true;
      Meeting& meeting = meetings_[key];
      meeting.latest = std::max(meeting.latest, now_[rank]);
      if (++meeting.present == needed) {
        double& free = free_[channel];
        const double start = std::max(meeting.latest, free);
        meeting.span = TimedAction{-1, start, start + seconds, true};
        free = start + seconds;
      }
      if (!costs_[rank].overlap && !receives(a.kind)) now_[rank] += seconds;  // its own cores move the bytes
    }
    if (a.half == Half::kStart) return true;
    const Meeting& meeting = meetings_[key];
    if (!meeting.span) return false;
    now_[rank] = std::max(now_[rank], meeting.span->end);
    record(rank, *meeting.span);
    started_.erase({key, static_cast<int32_t>(rank)});
    if (needed == 1) meetings_.erase(key);  // a unit may come again
    return true;
  }

  static bool receives(Kind kind) { return kind == Kind::kRecvInput || kind == Kind::kRecvOutputGrad; }

  const std::vector<Plan>& plans_;
  const std::vector<PlanTask>& tasks_;
  const std::vector<PlanCosts>& costs_;
  std::vector<size_t> at_;   // by rank: the action that comes next
  std::vector<double> now_;  // by rank: when its compute is free
  std::map<Channel, double> free_;
  std::map<Key, Meeting> meetings_;
  std::map<std::pair<Key, int32_t>, bool> started_;
  std::map<int32_t, size_t> sharers_;  // of a unit that spans ranks
  Timeline timeline_;
};

}  // namespace

double Timeline::bubble() const {
  double idle = 0;
  for (const Rank& rank : ranks) {
    double used = rank.busy;
    for (const TimedAction& action : rank.actions) used += action.action < 0 ? action.end - action.start : 0;
    idle += seconds - used;
  }
  return ranks.empty() || seconds == 0 ? 0 : idle / (seconds * static_cast<double>(ranks.size()));
}

Timeline simulate(const std::vector<Plan>& plans, const std::vector<PlanTask>& tasks,
                  const std::vector<PlanCosts>& costs) {
  if (plans.size() != tasks.size() || plans.size() != costs.size())
    throw Bug("simulate: {} plans, {} tasks, {} costs", plans.size(), tasks.size(), costs.size());
  for (size_t r = 0; r < plans.size(); ++r) {
    if (costs[r].blocks.size() != tasks[r].part.blocks.size() ||
        costs[r].units.size() != tasks[r].part.units.size())
      throw Bug("simulate: rank {}: costs of {} blocks and {} units for {} and {}", r, costs[r].blocks.size(),
                costs[r].units.size(), tasks[r].part.blocks.size(), tasks[r].part.units.size());
  }
  return Simulation(plans, tasks, costs).run();
}

}  // namespace titanium
