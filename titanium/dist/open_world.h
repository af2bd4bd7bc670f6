// The world of this process.
#pragma once
#include <memory>

#include "titanium/config/train_config.h"
#include "titanium/dist/launch_env.h"
#include "titanium/dist/world.h"

namespace titanium {

// As the environment (launch_env.h) and comm.transport say; "auto" is local where all ranks are on one host,
// else gloo.  A world of one needs no transport.  Waits for all ranks, comm.init_timeout_seconds at most.
// BadConfig: the environment, a transport that this build does not have or that cannot join these ranks, or
// ranks of another build (program.h); RankLost: ranks that did not come.
std::shared_ptr<World> open_world(const CommConfig& comm, const LaunchEnv& env = read_launch_env());

}  // namespace titanium
