// For tests: ranks as processes, children of this one.
#pragma once
#include <functional>
#include <memory>

#include "titanium/dist/world.h"

namespace titanium {

// Runs `work` as every rank of a world that `open` makes in each process, and returns when all have ended. As
// run_ranks: throws the first cause.  A child that a test assertion failed in, or that a signal ended, is a
// failure of the test; `killed` is the rank that may be ended by a signal.
void fork_ranks(int size, const std::function<std::shared_ptr<World>(int rank, int size)>& open,
                const std::function<void(std::shared_ptr<World>)>& work, int killed = -1);

}  // namespace titanium
