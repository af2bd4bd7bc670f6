// From a task and options to a plan ready to run.  Start here.
#pragma once
#include <string>
#include <vector>

#include "titanium/schedule/action.h"
#include "titanium/schedule/options.h"
#include "titanium/schedule/part.h"

namespace titanium {

// What each step of make_plan cost.
struct PassTime {
  std::string pass;    // "build", then the passes that ran
  double seconds = 0;  // of the pass alone
  size_t actions = 0;  // in the plan after it
};

// Builds, runs the passes, and checks after each one.  Depends on nothing but its arguments.
// BadConfig for an option out of range or an unknown name in `disabled_passes`; Bug, naming the pass, when a
// pass breaks a plan.
Plan make_plan(const PlanTask& task, const PlanOptions& options = {}, std::vector<PassTime>* times = nullptr);

// The plans of all pipeline ranks, which check_together has proved: with as many sends in flight as that
// needs, where options.pending_sends are too few.
std::vector<Plan> make_plans(const std::vector<PlanTask>& tasks, PlanOptions options = {});

}  // namespace titanium
