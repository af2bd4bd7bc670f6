// The passes: each takes a plan and returns it with one concern added, in this order.  They are pure, and
// they read the list they get, not how it was built.
#pragma once
#include "titanium/schedule/action.h"
#include "titanium/schedule/options.h"
#include "titanium/schedule/part.h"

namespace titanium {

// Turns `forward b keep` into `forward b drop` for the blocks that the options choose, and puts `recompute b`
// just before their backward.
Plan add_recompute(const Plan& plan, const PlanTask& task, const PlanOptions& options);

// Puts `offload b` after a chosen forward, whose wait comes after the next block has run, and `onload b` one
// block ahead of the backward or recompute that needs it.  Forwards whose backward is near stay where they
// are.
Plan add_offload(const Plan& plan, const PlanTask& task, const PlanOptions& options);

// Puts `> recv_input b` a step of its stage before the forward that needs it and `. recv_input b` right
// before it, `> send_output b` after the last block's forward, and likewise for gradients.  Each boundary
// between two ranks is a channel a direction, on which receives start in the order of the sends.  A send is
// waited for when `pending_sends` of its channel are in flight, or at the end.
Plan add_send_recv(const Plan& plan, const PlanTask& task, const PlanOptions& options);

// Puts `> unshard u` `prefetch` steps before a use, `. unshard u` right before it and `reshard u` after it.
// A step is a run of compute actions of one block and one micro-batch, such as `recompute 1 | backward 1`.
Plan add_unshard(const Plan& plan, const PlanTask& task, const PlanOptions& options);

// Puts `> reduce u` after the last action that adds to the gradient of u, in the plan or in each micro-batch,
// and the wait as late as possible: before the gradient is added to again, when `pending_reduces` are in
// flight, or at the end.
Plan add_reduce(const Plan& plan, const PlanTask& task, const PlanOptions& options);

// What stands in when `unshard` or `reduce` is switched off.
Plan gather_all(const Plan& plan, const PlanTask& task);
Plan reduce_at_end(const Plan& plan, const PlanTask& task);

}  // namespace titanium
