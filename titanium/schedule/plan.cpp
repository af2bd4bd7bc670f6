#include "titanium/schedule/plan.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "titanium/base/error.h"
#include "titanium/schedule/build.h"
#include "titanium/schedule/check.h"
#include "titanium/schedule/passes/passes.h"

namespace titanium {

Plan make_plan(const PlanTask& task, const PlanOptions& options, std::vector<PassTime>* times) {
  validate(options);
  Plan plan;
  CheckScope scope{.sent = false, .gathered = false, .reduced = false};

  const auto run = [&](const char* pass, const std::function<Plan()>& make) {
    const auto start = std::chrono::steady_clock::now();
    plan = make();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (times) times->push_back({pass, seconds.count(), plan.size()});
    try {
      check(plan, task, scope);
    } catch (const Bug& error) {
      throw Bug("plan, after `{}`: {}", pass, error.what());
    }
  };
  const auto enabled = [&](const char* pass) {
    const auto& off = options.disabled_passes;
    return std::find(off.begin(), off.end(), pass) == off.end();
  };

  run("build", [&] { return build(task); });
  if (enabled("recompute")) run("recompute", [&] { return add_recompute(plan, task, options); });
  if (enabled("offload")) run("offload", [&] { return add_offload(plan, task, options); });
  scope.sent = true;
  if (task.order) run("send_recv", [&] { return add_send_recv(plan, task, options); });
  scope.gathered = true;
  run("unshard",
      [&] { return enabled("unshard") ? add_unshard(plan, task, options) : gather_all(plan, task); });
  scope.reduced = true;
  run("reduce",
      [&] { return enabled("reduce") ? add_reduce(plan, task, options) : reduce_at_end(plan, task); });
  return plan;
}

std::vector<Plan> make_plans(const std::vector<PlanTask>& tasks, PlanOptions options) {
  while (true) {
    std::vector<Plan> plans;
    for (const PlanTask& task : tasks) plans.push_back(make_plan(task, options));
    try {
      check_together(plans, tasks);
      return plans;
    } catch (const Bug&) {
      if (options.pending_sends == 0) throw;
    }
    options.pending_sends *= 2;
    if (options.pending_sends > tasks.at(0).micro_batches) options.pending_sends = 0;
  }
}

}  // namespace titanium
