// A world that is planned, not connected: what a rank of any cluster would be, worked out on one machine.
#pragma once
#include <memory>

#include "titanium/dist/world.h"

namespace titanium {

// Rank `rank` of `size`.  Groups have their ranks and sizes; in an exchange this rank speaks for all, so
// that they agree; to move a tensor is a Bug.
std::shared_ptr<World> planned_world(int rank, int size);

}  // namespace titanium
