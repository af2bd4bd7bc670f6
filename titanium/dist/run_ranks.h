// Ranks as threads of this process.
#pragma once
#include <chrono>
#include <functional>
#include <memory>

#include "titanium/dist/world.h"

namespace titanium {

// Runs `work` as every rank of a world of `size`, each in a thread of its own that computes alone, and
// returns when all have ended.  What a rank throws ends the others too, and is thrown here: the first cause,
// not a RankLost that followed from it.
void run_ranks(int size, const std::function<void(std::shared_ptr<World>)>& work,
               std::chrono::milliseconds timeout = std::chrono::seconds(100));

}  // namespace titanium
