#include <algorithm>
#include <deque>

#include "titanium/schedule/passes/passes.h"

namespace titanium {
namespace {

// The trainable units whose gradient the action adds to.
std::vector<int32_t> touched(const Action& action, const ModelPart& part) {
  std::vector<int32_t> units;
  if (!adds_gradient(action.kind)) return units;
  for (const int32_t unit : part.blocks[action.block].units) {
    if (part.units[unit].trainable) units.push_back(unit);
  }
  return units;
}

}  // namespace

Plan add_reduce(const Plan& plan, const PlanTask& task, const PlanOptions& options) {
  const ModelPart& part = task.part;
  const size_t rounds = options.reduce == ReduceWhen::kEachMicroBatch ? task.micro_batches : 1;
  const auto slot = [&](int32_t unit, int32_t micro_batch) {
    const bool each = rounds > 1 && part.units[unit].spans < 0;
    return static_cast<size_t>(unit) * rounds + (each ? static_cast<size_t>(micro_batch) : 0);
  };
  std::vector<size_t> last(part.units.size() * rounds);
  for (size_t i = 0; i < plan.size(); ++i) {
    for (const int32_t unit : touched(plan[i], part)) last[slot(unit, plan[i].micro_batch)] = i;
  }

  Plan out;
  out.reserve(plan.size() + 2 * last.size());
  std::deque<int32_t> pending;  // oldest first
  std::vector<int32_t> spanning;
  const auto wait = [&](const std::deque<int32_t>::const_iterator& reduction) {
    out.push_back(Action::of_unit(Kind::kReduce, Half::kWait, *reduction));
    pending.erase(reduction);
  };
  const auto limit = static_cast<size_t>(options.pending_reduces);
  for (size_t i = 0; i < plan.size(); ++i) {
    const std::vector<int32_t> units = touched(plan[i], part);
    for (const int32_t unit : adds_in_forward(plan[i], part) ? part.blocks[plan[i].block].units : units) {
      const auto busy = std::find(pending.begin(), pending.end(), unit);
      if (busy != pending.end()) wait(busy);
    }
    out.push_back(plan[i]);
    for (const int32_t unit : units) {
      if (last[slot(unit, plan[i].micro_batch)] != i) continue;
      if (part.units[unit].spans >= 0) {
        spanning.push_back(unit);  // others come to it at their end
        continue;
      }
      if (limit > 0 && pending.size() == limit) wait(pending.begin());
      out.push_back(Action::of_unit(Kind::kReduce, Half::kStart, unit));
      pending.push_back(unit);
    }
  }
  for (const int32_t unit : spanning) {
    out.push_back(Action::of_unit(Kind::kReduce, Half::kStart, unit));
    pending.push_back(unit);
  }
  while (!pending.empty()) wait(pending.begin());
  return out;
}

Plan reduce_at_end(const Plan& plan, const PlanTask& task) {
  std::vector<bool> dirty(task.part.units.size(), false);
  for (const Action& action : plan) {
    for (const int32_t unit : touched(action, task.part)) dirty[unit] = true;
  }
  Plan out = plan;
  for (size_t unit = 0; unit < dirty.size(); ++unit) {
    if (!dirty[unit]) continue;
    out.push_back(Action::of_unit(Kind::kReduce, Half::kStart, static_cast<int32_t>(unit)));
    out.push_back(Action::of_unit(Kind::kReduce, Half::kWait, static_cast<int32_t>(unit)));
  }
  return out;
}

}  // namespace titanium
