#include "titanium/dist/open_world.h"

#include <algorithm>
#include <iterator>
#include <string_view>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/dist/gloo.h"
#include "titanium/dist/local.h"
#include "titanium/dist/local_meet.h"
#include "titanium/dist/nccl.h"
#include "titanium/dist/program.h"

namespace titanium {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::shared_ptr<World> open_local(const CommConfig& comm, const LaunchEnv& env) {
  if (env.local_size > 0 && env.local_size != env.size) {
    throw BadConfig("comm.transport = local joins ranks of one host: of {} ranks, {} are on this one",
                    env.size, env.local_size);
  }
  const std::string place =
      fmt::format("{}:{}{}{}", env.master_addr, env.master_port, env.job.empty() ? "" : ":", env.job);
  return local_world(meet_local(place, env.rank, env.size, seconds(comm.init_timeout_seconds)), env.rank,
                     seconds(comm.train_timeout_seconds));
}

void check_address(const char* transport, const LaunchEnv& env) {
  if (env.addr_given || env.one_host() || env.local_size == env.size) return;
  throw BadConfig("comm.transport {}: MASTER_ADDR is not set: give the name or address of the host of rank 0",
                  transport);
}

std::shared_ptr<World> open_gloo(const CommConfig& comm, const LaunchEnv& env) {
  check_address("gloo", env);
  return gloo_world(comm, env.rank, env.size, env.master_addr, env.master_port);
}

std::shared_ptr<World> open_nccl(const CommConfig& comm, const LaunchEnv& env) {
  check_address("nccl", env);
  return nccl_world(comm, env.rank, env.size, env.master_addr, env.master_port);
}

// One that is not in this build refuses.
struct Backend {
  std::string_view name;
  std::shared_ptr<World> (*open)(const CommConfig&, const LaunchEnv&);
};
constexpr Backend kBackends[] = {{"local", open_local}, {"gloo", open_gloo}, {"nccl", open_nccl}};

}  // namespace

std::shared_ptr<World> open_world(const CommConfig& comm, const LaunchEnv& env) {
  if (env.size == 1) return solo_world();
  const std::string name = comm.transport != "auto" ? comm.transport : env.one_host() ? "local" : "gloo";
  const auto backend = std::find_if(std::begin(kBackends), std::end(kBackends),
                                    [&](const Backend& b) { return b.name == name; });
  if (backend == std::end(kBackends)) throw BadConfig("comm.transport = {}: not a transport", name);
  std::shared_ptr<World> world = backend->open(comm, env);
  agree_on(world->all(), "the program", program_identity());
  return world;
}

}  // namespace titanium
