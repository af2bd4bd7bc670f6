// A command as one rank of the world that the environment describes.
#pragma once
#include <functional>
#include <memory>

#include "titanium/config/train_config.h"
#include "titanium/dist/world.h"
#include "titanium/report/log.h"

namespace titanium {

// Runs `work` with the world (of one, where no launcher set RANK and its kin).  What it throws ends the other
// ranks too, with this rank and the reason in their error, and is thrown on.
int on_ranks(const CommConfig& comm, const std::function<int(std::shared_ptr<World>)>& work);

// For a log of one rank: the lines of others than rank 0 start with an error.
LogOptions log_of(const World& world, LogLevel level = LogLevel::kInfo);

}  // namespace titanium
