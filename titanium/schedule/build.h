// The compute-only list: which block runs when.  Everything else is added by passes.
#pragma once
#include "titanium/schedule/action.h"
#include "titanium/schedule/part.h"

namespace titanium {

// The blocks of each action of the rank's order; without a pipeline, gradient accumulation: for each
// micro-batch all forwards, the loss, and all backwards in reverse.  The loss follows the last block of the
// last stage.  The head is never split: its weight gradient, put off, would hold that of the logits. Forwards
// `keep`; a block without backward (frozen, and all before it too) saves nothing.  With `task.forward_only`
// there are forwards and the loss, and nothing is saved.
Plan build(const PlanTask& task);

}  // namespace titanium
