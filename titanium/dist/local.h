// The transport of one host: ranks over shared memory, as threads of one process or as processes.  Sums are
// taken in rank order; a collective is a row of rounds of at most kSlotBytes a rank (local_memory.h).
#pragma once
#include <chrono>
#include <memory>
#include <vector>

#include "titanium/dist/world.h"

namespace titanium {

class LocalMemory;

// Rank `rank` of the ranks at this memory.  A rank that waits for another throws RankLost when any rank
// failed, when that one ended (its process died, or its world and groups are no more), or after `timeout`.
std::shared_ptr<World> local_world(std::shared_ptr<LocalMemory> memory, int rank,
                                   std::chrono::milliseconds timeout);

// All ranks of a world in this process: one for each thread.
std::vector<std::shared_ptr<World>> local_worlds(int size, std::chrono::milliseconds timeout);

}  // namespace titanium
