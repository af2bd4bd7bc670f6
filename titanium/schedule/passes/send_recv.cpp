#include <algorithm>
#include <deque>
#include <map>
#include <optional>

#include "titanium/schedule/passes/passes.h"

namespace titanium {
namespace {

// A channel: what goes over the boundary after a stage, in one direction.
struct Channel {
  std::vector<int32_t> sent;     // micro-batches, in the order of the sender
  size_t started = 0;            // receives of them
  std::deque<Action> in_flight;  // sends
};

bool is_backward(Kind kind) {
  return kind == Kind::kBackward || kind == Kind::kBackwardInput;
}

// Actions of one stage, micro-batch and direction, and the loss between two of them.
struct StageRun {
  size_t first;
  int32_t stage, micro_batch;
  bool backward;
  bool operator==(const StageRun& o) const {
    return stage == o.stage && micro_batch == o.micro_batch && backward == o.backward;
  }
};

}  // namespace

Plan add_send_recv(const Plan& plan, const PlanTask& task, const PlanOptions& options) {
  if (!task.order) return plan;
  const ModelPart& part = task.part;
  // The order in which the stage's peers send: forwards of the stage before, input gradients of the one
  // after.
  const auto sends_of = [&](int32_t stage, bool backward) {
    std::vector<int32_t> sent;
    for (const StageAction& a : task.order->ranks[task.order->rank_of[stage]]) {
      const bool goes_back = a.kind == StageKind::kBackward || a.kind == StageKind::kBackwardInput;
      if (a.stage == stage && a.kind != StageKind::kBackwardWeight && goes_back == backward)
        sent.push_back(a.micro_batch);
    }
    return sent;
  };
  std::map<std::pair<int32_t, bool>, Channel> receives, sends;  // by this rank's stage, and direction
  for (const PlanStage& stage : part.stages) {
    if (stage.receives()) receives[{stage.index, false}].sent = sends_of(stage.index - 1, false);
    if (stage.sends()) receives[{stage.index, true}].sent = sends_of(stage.index + 1, true);
  }

  std::vector<StageRun> runs;
  std::vector<size_t> run_of(plan.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    const Action& a = plan[i];
    if (names_block(a.kind)) {
      const StageRun run{i, part.stage_of(a.block).index, a.micro_batch, a.kind != Kind::kForward};
      if (runs.empty() || !(runs.back() == run)) runs.push_back(run);
    }
    run_of[i] = runs.empty() ? 0 : runs.size() - 1;
  }

  // before[i]: receives that start before action i of the plan.
  std::vector<Plan> before(plan.size());
  const auto needs = [&](const Action& a, const PlanStage& stage) -> std::optional<Action> {
    if (a.kind == Kind::kForward && a.block == stage.first_block && stage.receives())
      return Action::of_block(Kind::kRecvInput, a.block, a.micro_batch, Half::kWait);
    if (is_backward(a.kind) && a.block == stage.first_block + stage.block_count - 1 && stage.sends())
      return Action::of_block(Kind::kRecvOutputGrad, a.block, a.micro_batch, Half::kWait);
    return std::nullopt;
  };
  for (size_t i = 0; i < plan.size(); ++i) {
    if (!names_block(plan[i].kind)) continue;
    const PlanStage& stage = part.stage_of(plan[i].block);
    const std::optional<Action> wait = needs(plan[i], stage);
    if (!wait) continue;
    Channel& channel = receives[{stage.index, wait->kind == Kind::kRecvOutputGrad}];
    const size_t at = runs[run_of[i] > 0 ? run_of[i] - 1 : 0].first;
    const auto wanted = std::find(channel.sent.begin(), channel.sent.end(), wait->micro_batch);
    const size_t until = static_cast<size_t>(wanted - channel.sent.begin()) + 1;
    for (; channel.started < until && channel.started < channel.sent.size(); ++channel.started) {
      Action start = *wait;
      start.half = Half::kStart;
      start.micro_batch = channel.sent[channel.started];
      before[at].push_back(start);
    }
  }

  Plan out;
  out.reserve(plan.size() + 4 * runs.size());
  const auto send = [&](Kind kind, const PlanStage& stage, const Action& after) {
    Channel& channel = sends[{stage.index, kind == Kind::kSendInputGrad}];
    if (options.pending_sends > 0 && channel.in_flight.size() == static_cast<size_t>(options.pending_sends)) {
      out.push_back(channel.in_flight.front());
      channel.in_flight.pop_front();
    }
    out.push_back(Action::of_block(kind, after.block, after.micro_batch, Half::kStart));
    channel.in_flight.push_back(Action::of_block(kind, after.block, after.micro_batch, Half::kWait));
  };
  for (size_t i = 0; i < plan.size(); ++i) {
    const Action& a = plan[i];
    out.insert(out.end(), before[i].begin(), before[i].end());
    if (!names_block(a.kind)) {
      out.push_back(a);
      continue;
    }
    const PlanStage& stage = part.stage_of(a.block);
    if (const std::optional<Action> wait = needs(a, stage)) out.push_back(*wait);
    out.push_back(a);
    if (a.kind == Kind::kForward && stage.sends() && a.block == stage.first_block + stage.block_count - 1)
      send(Kind::kSendOutput, stage, a);
    if (is_backward(a.kind) && stage.receives() && stage.trainable_before && a.block == stage.first_block)
      send(Kind::kSendInputGrad, stage, a);
  }
  for (auto& [boundary, channel] : sends)
    out.insert(out.end(), channel.in_flight.begin(), channel.in_flight.end());
  return out;
}

}  // namespace titanium
