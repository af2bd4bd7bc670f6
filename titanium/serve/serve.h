// `titanium serve`: a process around one engine.
#pragma once
#include <optional>
#include <string>

#include "titanium/serve/service.h"

namespace titanium {

struct ServeOptions {
  int fd = -1;         // a connected socket that was inherited: serve that client, then end
  std::string listen;  // or an address (listener.h): serve one client after the other
  // An engine that is there when a client comes: {config, model_type, backend, device}.
  std::optional<Json> create;
};

// Returns the exit status: 0 when the client has said close (or, listening, when a signal asked for the end),
// 5 when the client died, 3 when a spawned server could not understand its client, 70 or 5 after a Bug or a
// RankLost. A client that dies while the engine computes, or a signal, ends the process within five seconds,
// from another thread, with 5.
//
// `open_world` says which of several ranks this is; without it the only one.  A rank that ends otherwise than
// by close tells the others, whose calls end with RankLost.
int serve(const ServeOptions& options, const EngineRegistry& registry, Log& log,
          Service::OpenWorld open_world = {});

}  // namespace titanium
