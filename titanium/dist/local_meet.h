// Where processes of one host meet to share memory.
#pragma once
#include <chrono>
#include <memory>
#include <string>

#include "titanium/dist/local_memory.h"

namespace titanium {

// Rank 0 makes the memory and waits at `place` until all others have come; it gives all of them the same
// memory, or all the same error.  The place is a socket without a name on disk, of this user; it and the
// memory file are gone with the last process that holds them, however that ends.  RankLost names the ranks
// that did not come within `timeout`, or that ended meanwhile; BadConfig: ranks that disagree on their
// number, two with the same rank, or a place that another run has taken.
std::shared_ptr<LocalMemory> meet_local(const std::string& place, int rank, int size,
                                        std::chrono::milliseconds timeout);

}  // namespace titanium
