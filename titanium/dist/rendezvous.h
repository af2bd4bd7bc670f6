// Where ranks of several hosts meet: MASTER_ADDR and MASTER_PORT as sockets, and the address by which the
// others reach this host.
#pragma once
#include <chrono>
#include <string>

namespace titanium {

// Listens at the port, on all addresses of this host, and returns the socket.  Port 0 takes a free one.
// BadConfig names MASTER_PORT when it is in use or not allowed.
int listen_at(int port);
int port_of(int socket);

struct Reached {
  std::string own, other;  // numeric: this host's address on the way, and that of who listens
};
// Returns when somebody listens at addr:port.  BadConfig at the deadline, with MASTER_ADDR, MASTER_PORT and
// what went wrong last.
Reached reach(const std::string& addr, int port, std::chrono::steady_clock::time_point deadline);

bool is_loopback(const std::string& address);
// This host's own address on the way to another; empty where there is no way.
std::string address_towards(const std::string& address);

}  // namespace titanium
