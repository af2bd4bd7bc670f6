// A thread that looks after a connection while the server computes: a client that is gone must not leave a
// server behind, and a second client must hear that it is one too many.
#pragma once
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "titanium/serve/listener.h"

namespace titanium {

struct WatchOptions {
  Listener* listener = nullptr;  // its further clients are refused
  int signals = -1;              // a signalfd: SIGTERM and SIGINT end the server
  // The server's thread has this long to come back from what it computes when its client is gone; then
  // `give_up`.
  std::chrono::milliseconds grace{4000};
  // Called on the watching thread.  The first before the connection is cut, so that who finds it cut knows
  // why; the second behind that; the last may end the process.
  std::function<void(const std::string&why)> cuts, lost, give_up;
};

class Watch {
 public:
  // `connection` outlives the watch.
  Watch(Connection& connection, WatchOptions options);
  ~Watch();  // the server's thread has come back
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

 private:
  void run();
  void refuse();

  Connection& connection_;
  WatchOptions options_;
  Fd peer_;  // a pidfd of the client's process: a child of its that holds the socket too must not hide its
             // death
  Fd stop_;  // eventfd
  std::thread thread_;
};

}  // namespace titanium
