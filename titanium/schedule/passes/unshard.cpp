#include "titanium/schedule/passes/passes.h"
#include "titanium/schedule/passes/runs.h"

namespace titanium {
namespace {

// used_again[s][k]: the next step after s that uses the k-th unit of its block, or the number of steps.
std::vector<std::vector<size_t>> next_uses(const std::vector<BlockRun>& work, const ModelPart& part) {
  std::vector<std::vector<size_t>> used_again(work.size());
  std::vector<size_t> next(part.units.size(), work.size());
  for (size_t s = work.size(); s-- > 0;) {
    const auto& units = part.blocks[work[s].block].units;
    for (const int32_t unit : units) used_again[s].push_back(next[unit]);
    for (const int32_t unit : units) next[unit] = s;
  }
  return used_again;
}

}  // namespace

Plan add_unshard(const Plan& plan, const PlanTask& task, const PlanOptions& options) {
  const ModelPart& part = task.part;
  const std::vector<BlockRun> work = block_runs(plan);
  const auto used_again = next_uses(work, part);
  const auto ahead = static_cast<size_t>(options.prefetch);

  const auto stays = [&](size_t s, int32_t unit, size_t next_use) {
    if (part.units[unit].spans >= 0) return true;
    switch (options.reshard_after_forward) {
      case Reshard::kAlways:
        return false;
      case Reshard::kNever:
        return true;
      case Reshard::kDefault:
        break;
    }
    // Given back, it would be asked for again before step s + 1.
    return next_use < work.size() && next_use <= s + 1 + ahead;
  };

  Plan out;
  out.reserve(plan.size() * 3);
  std::vector<bool> started(part.units.size(), false), gathered(part.units.size(), false);
  for (const BlockRun& run : work) {
    for (const int32_t unit : part.blocks[run.block].units) {
      if (part.units[unit].spans < 0 || started[unit]) continue;
      out.push_back(Action::of_unit(Kind::kUnshard, Half::kStart, unit));
      started[unit] = true;
    }
  }
  size_t next = 0;  // index of the plan
  for (size_t s = 0; s < work.size(); ++s) {
    out.insert(out.end(), plan.begin() + next, plan.begin() + work[s].first);
    for (size_t k = s; k <= s + ahead && k < work.size(); ++k) {
      for (const int32_t unit : part.blocks[work[k].block].units) {
        if (!started[unit]) out.push_back(Action::of_unit(Kind::kUnshard, Half::kStart, unit));
        started[unit] = true;
      }
    }
    const auto& units = part.blocks[work[s].block].units;
    for (const int32_t unit : units) {
      if (!gathered[unit]) out.push_back(Action::of_unit(Kind::kUnshard, Half::kWait, unit));
      gathered[unit] = true;
    }
    next = work[s].last + 1;
    out.insert(out.end(), plan.begin() + work[s].first, plan.begin() + next);
    for (size_t k = 0; k < units.size(); ++k) {
      if (stays(s, units[k], used_again[s][k])) continue;
      out.push_back(Action::of_unit(Kind::kReshard, Half::kWhole, units[k]));
      started[units[k]] = gathered[units[k]] = false;
    }
  }
  out.insert(out.end(), plan.begin() + next, plan.end());
  for (size_t unit = 0; unit < started.size(); ++unit) {
    if (started[unit])
      out.push_back(Action::of_unit(Kind::kReshard, Half::kWhole, static_cast<int32_t>(unit)));
  }
  return out;
}

Plan gather_all(const Plan& plan, const PlanTask& task) {
  std::vector<bool> used(task.part.units.size(), false);
  for (const Action& action : plan) {
    if (!uses_weights(action.kind)) continue;
    for (const int32_t unit : task.part.blocks[action.block].units) used[unit] = true;
  }
  Plan out;
  const auto put = [&](Kind kind, Half half) {
    for (size_t unit = 0; unit < used.size(); ++unit) {
      if (used[unit]) out.push_back(Action::of_unit(kind, half, static_cast<int32_t>(unit)));
    }
  };
  put(Kind::kUnshard, Half::kStart);
  put(Kind::kUnshard, Half::kWait);
  out.insert(out.end(), plan.begin(), plan.end());
  put(Kind::kReshard, Half::kWhole);
  return out;
}

}  // namespace titanium
