#include "apps/on_ranks.h"

#include <exception>

#include "titanium/dist/open_world.h"

namespace titanium {

int on_ranks(const CommConfig& comm, const std::function<int(std::shared_ptr<World>)>& work) {
  const std::shared_ptr<World> world = open_world(comm);
  try {
    world->progress(0, "start");
    const int status = work(world);
    // No rank leaves while another still counts on it.
    world->all().barrier();
    return status;
  } catch (const std::exception& e) {
    world->fail(e.what());
    throw;
  }
}

LogOptions log_of(const World& world, LogLevel level) {
  LogOptions options;
  options.rank = world.rank();
  options.world_size = world.size();
  options.level = world.rank() == 0 ? level : LogLevel::kError;
  return options;
}

}  // namespace titanium
