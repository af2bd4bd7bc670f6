#include "apps/on_ranks.h"

#include <fmt/format.h>

#include <cstdlib>
#include <exception>
#include <string>
#include <string_view>

#include "titanium/dist/launch.h"
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
    // An error that was agreed on says the rank already; the others' error will say it once more.
    std::string_view reason = e.what();
    if (const std::string own = fmt::format("rank {}: ", world->rank()); reason.starts_with(own))
      reason.remove_prefix(own.size());
    world->fail(std::string(reason));
    throw;
  }
}

LogOptions log_of(const World& world, LogLevel level) {
  LogOptions options;
  options.rank = world.rank();
  options.world_size =
      std::getenv(kLauncherVariable) ? 1 : world.size();  // it says the rank before each line
  options.level = world.rank() == 0 ? level : LogLevel::kError;
  return options;
}

}  // namespace titanium
