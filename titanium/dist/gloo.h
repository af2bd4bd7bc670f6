// Ranks of several hosts over TCP: c10d's store to meet at, its Gloo to send and receive.
#pragma once
#include <memory>
#include <string>

#include "titanium/config/train_config.h"
#include "titanium/dist/world.h"

namespace titanium {

// Rank `rank` of `size`.  They meet at addr:port (MASTER_ADDR, MASTER_PORT), where rank 0 listens, unless
// torchrun's agent does (TORCHELASTIC_USE_AGENT_STORE).  Connections between ranks go by the address that
// leads to addr, or by the interfaces of GLOO_SOCKET_IFNAME.  BadConfig names the variable that is wrong;
// RankLost, the ranks that did not come within comm.init_timeout_seconds.  Afterwards a wait lasts
// comm.train_timeout_seconds at most.  BadConfig where the build has no Gloo.
std::shared_ptr<World> gloo_world(const CommConfig& comm, int rank, int size, const std::string& addr,
                                  int port);

// The same of two ranks or more, for transports that use its watch (rank_watch.h).
class RankWatch;
class WatchedWorld : public World {
 public:
  virtual RankWatch& watch() = 0;
};
std::shared_ptr<WatchedWorld> watched_gloo_world(const CommConfig& comm, int rank, int size,
                                                 const std::string& addr, int port);

}  // namespace titanium
