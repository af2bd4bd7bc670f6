#include "titanium/schedule/passes/passes.h"
#include "titanium/schedule/passes/runs.h"

namespace titanium {
namespace {

// Bytes leave during the next step and return during the one before they are wanted; with fewer steps than
// this they would not be away during any.
constexpr size_t kWorthwhileSteps = 4;

}  // namespace

Plan add_offload(const Plan& plan, const PlanTask& task, const PlanOptions& options) {
  if (options.offload_every == 0) return plan;
  const std::vector<bool> chosen = every_nth(task.part, options.offload_every);
  const std::vector<BlockRun> work = block_runs(plan);
  const size_t blocks = task.part.blocks.size();

  // leaves[s]: step s is a forward whose saved bytes leave; returns[s]: step s is where they are wanted
  // again.
  std::vector<bool> leaves(work.size(), false), returns(work.size(), false);
  std::vector<size_t> forward_of(blocks * static_cast<size_t>(task.micro_batches));
  for (size_t s = 0; s < work.size(); ++s) {
    if (!chosen[work[s].block]) continue;
    size_t& forward = forward_of[static_cast<size_t>(work[s].micro_batch) * blocks + work[s].block];
    if (plan[work[s].first].kind == Kind::kForward) {
      forward = s;
    } else if (s - forward >= kWorthwhileSteps) {
      leaves[forward] = returns[s] = true;
    }
  }

  Plan out;
  out.reserve(plan.size() * 2);
  const auto put = [&](Half half, Kind kind, size_t s) {
    out.push_back(Action::of_block(kind, work[s].block, work[s].micro_batch, half));
  };
  size_t next = 0;
  for (size_t s = 0; s < work.size(); ++s) {
    out.insert(out.end(), plan.begin() + next, plan.begin() + work[s].first);
    if (s + 1 < work.size() && returns[s + 1]) put(Half::kStart, Kind::kOnload, s + 1);
    if (returns[s]) put(Half::kWait, Kind::kOnload, s);
    next = work[s].last + 1;
    out.insert(out.end(), plan.begin() + work[s].first, plan.begin() + next);
    if (s > 0 && leaves[s - 1]) put(Half::kWait, Kind::kOffload, s - 1);
    if (leaves[s]) put(Half::kStart, Kind::kOffload, s);
  }
  out.insert(out.end(), plan.begin() + next, plan.end());
  return out;
}

}  // namespace titanium
