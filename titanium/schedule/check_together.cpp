#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>

#include "titanium/base/error.h"
#include "titanium/schedule/check.h"

namespace titanium {
namespace {

// What goes over the boundary after a stage, in one direction: micro-batches in the order of their starts.
struct Channel {
  std::vector<int32_t> sent, received;
};

// Gathers and reductions of units that span ranks, in the order of their starts on one rank.
using Starts = std::vector<std::pair<Kind, int32_t>>;

// A gather or a reduction of a unit that spans ranks: how many members there are, and have started.
struct Meeting {
  int members = 0, gathers = 0, reduces = 0;
};

class Together {
 public:
  Together(const std::vector<Plan>& plans, const std::vector<PlanTask>& tasks)
      : plans_(plans), tasks_(tasks), starts_(plans.size()) {
    if (plans.size() != tasks.size()) throw Bug("{} plans of {} pipeline ranks", plans.size(), tasks.size());
    for (const PlanTask& task : tasks) {
      for (const PlanUnit& unit : task.part.units) {
        if (unit.spans >= 0) ++meetings_[unit.spans].members;
      }
    }
  }

  void run() {
    std::vector<size_t> next(plans_.size(), 0);
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < plans_.size(); ++rank) {
        for (; next[rank] < plans_[rank].size() && may_pass(rank, plans_[rank][next[rank]]); ++next[rank])
          moved = true;
      }
    }
    std::string stuck;
    for (size_t rank = 0; rank < plans_.size(); ++rank) {
      if (next[rank] == plans_[rank].size()) continue;
      stuck += fmt::format("{}rank {} in action {} `{}`", stuck.empty() ? "" : ", ", rank, next[rank],
                           to_string(plans_[rank][next[rank]]));
    }
    if (!stuck.empty()) throw Bug("plans: ranks wait for each other for ever: {}", stuck);
    for (const auto& [at, channel] : channels_) {
      if (channel.sent.size() != channel.received.size())
        throw Bug("plans: {} sends and {} receives after stage {}", channel.sent.size(),
                  channel.received.size(), at.first);
    }
    for (size_t a = 0; a < plans_.size(); ++a) {
      for (size_t b = a + 1; b < plans_.size(); ++b) {
        if (shared(a, b) != shared(b, a))
          throw Bug("plans: ranks {} and {} start what they do with the units of both in two orders", a, b);
      }
    }
  }

 private:
  struct Peer {
    bool sends, gradient;
  };
  static std::optional<Peer> peer_of(Kind kind) {
    switch (kind) {
      case Kind::kSendOutput:
        return Peer{true, false};
      case Kind::kRecvInput:
        return Peer{false, false};
      case Kind::kSendInputGrad:
        return Peer{true, true};
      case Kind::kRecvOutputGrad:
        return Peer{false, true};
      default:
        return std::nullopt;
    }
  }

  // The starts of rank `a` that rank `b` takes part in.
  Starts shared(size_t a, size_t b) const {
    Starts result = starts_[a];
    std::erase_if(result, [&](const auto& start) {
      return std::none_of(tasks_[b].part.units.begin(), tasks_[b].part.units.end(),
                          [&](const PlanUnit& unit) { return unit.spans == start.second; });
    });
    return result;
  }

  // Does a start, or says whether a wait is over.
  bool may_pass(size_t rank, const Action& a) {
    if (const auto peer = peer_of(a.kind)) return may_pass(rank, a, *peer);
    if (a.kind != Kind::kUnshard && a.kind != Kind::kReduce) return true;
    const int32_t spans = tasks_[rank].part.units.at(a.unit).spans;
    if (spans < 0) return true;
    Meeting& meeting = meetings_[spans];
    int& started = a.kind == Kind::kUnshard ? meeting.gathers : meeting.reduces;
    if (a.half == Half::kStart) {
      ++started;
      starts_[rank].emplace_back(a.kind, spans);
    }
    return a.half == Half::kStart || started >= meeting.members;
  }

  bool may_pass(size_t rank, const Action& a, Peer peer) {
    const int32_t stage = tasks_[rank].part.stage_of(a.block).index;
    // The channel's number is that of the stage before the boundary.
    const bool at_end = a.kind == Kind::kSendOutput || a.kind == Kind::kRecvOutputGrad;
    Channel& channel = channels_[{at_end ? stage : stage - 1, peer.gradient}];
    std::vector<int32_t>& mine = peer.sends ? channel.sent : channel.received;
    const std::vector<int32_t>& other = peer.sends ? channel.received : channel.sent;
    if (a.half == Half::kStart) {
      mine.push_back(a.micro_batch);
      const size_t i = mine.size() - 1;
      if (i < other.size() && other[i] != a.micro_batch) {
        throw Bug("plans: rank {}, `{}`: the other end is at micro-batch {}", rank, to_string(a), other[i]);
      }
      return true;
    }
    const auto at = std::find(mine.begin(), mine.end(), a.micro_batch);
    return at != mine.end() && other.size() > static_cast<size_t>(at - mine.begin());
  }

  const std::vector<Plan>& plans_;
  const std::vector<PlanTask>& tasks_;
  std::map<std::pair<int32_t, bool>, Channel> channels_;
  std::map<int32_t, Meeting> meetings_;
  std::vector<Starts> starts_;  // [ranks]
};

}  // namespace

void check_together(const std::vector<Plan>& plans, const std::vector<PlanTask>& tasks) {
  Together(plans, tasks).run();
}

}  // namespace titanium
