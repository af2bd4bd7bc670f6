// Proves that a plan of one rank is complete and in order.  It knows nothing of how plans are made.
#pragma once
#include "titanium/schedule/action.h"
#include "titanium/schedule/part.h"

namespace titanium {

// A plan that has not gone through all passes is checked for what it has.
struct CheckScope {
  bool sent = true;      // stages receive and send
  bool gathered = true;  // units are gathered when used, and given back
  bool reduced = true;   // gradients are reduced
};

// Bug names the action's index, its text and the reason.  The rules:
//  - every block runs forward once per micro-batch, in order; the loss follows the last one; the backwards
//  follow
//    the loss in reverse order, once per block that has one;
//  - a backward finds everything saved: kept, or dropped and recomputed just once; nothing saved is left
//  over;
//  - a start is followed by its wait, a wait has its start, nothing is started twice;
//  - a unit is gathered while used, never given back during a transfer, never gathered twice;
//  - a gradient is not touched while being reduced, and every gradient ends up reduced, none twice;
//  - a unit that spans pipeline ranks is gathered and reduced once in a plan;
//  - at the end nothing is gathered, in flight, saved or unreduced.
void check(const Plan& plan, const PlanTask& task, CheckScope scope = {});

// Proves that the plans of all pipeline ranks end together.  A wait for a receive needs its send, a wait for
// a send its receive, a wait for a unit that spans ranks all of them; so it holds for transports that keep
// nothing in between.  Ranks that have several such units in common start with them in one
// order.  Bug names the ranks that wait for each other, the first send and receive of a stage boundary that
// are not of the same micro-batch, or the ranks whose orders differ.
void check_together(const std::vector<Plan>& plans, const std::vector<PlanTask>& tasks);

}  // namespace titanium
