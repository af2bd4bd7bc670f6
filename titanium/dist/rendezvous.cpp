#include "titanium/dist/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Null, and the reason, where the name is not known.
Addresses resolve(const std::string& name, int port, int kind, int flags, std::string& problem) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = kind;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) problem = code == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(code);
  return {code == 0 ? found : nullptr, freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST] = {};
  return getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

std::string own_address(int fd) {
  sockaddr_storage own = {};
  socklen_t length = sizeof own;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0) return "";
  return numeric(reinterpret_cast<sockaddr*>(&own), length);
}

// Connects within the time; else what went wrong.
std::string try_connect(int fd, const addrinfo& to, milliseconds within) {
  fcntl(fd, F_SETFL, O_NONBLOCK);
  if (connect(fd, to.ai_addr, to.ai_addrlen) == 0) return "";
  if (errno != EINPROGRESS) return std::strerror(errno);
  pollfd wait = {.fd = fd, .events = POLLOUT, .revents = 0};
  if (poll(&wait, 1, static_cast<int>(within.count())) <= 0) return "no answer";
  int code = 0;
  socklen_t length = sizeof code;
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &code, &length);
  return code == 0 ? "" : std::strerror(code);
}

}  // namespace

int listen_at(int port) {
  for (const int family : {AF_INET6, AF_INET}) {
    Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.fd() < 0) continue;
    const int yes = 1, no = 0;
    setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    sockaddr_in6 six = {};
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(static_cast<uint16_t>(port));
    sockaddr_in four = {};
    four.sin_family = AF_INET;
    four.sin_port = six.sin6_port;
    if (family == AF_INET6) setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    const auto* address = family == AF_INET6 ? reinterpret_cast<const sockaddr*>(&six)
                                             : reinterpret_cast<const sockaddr*>(&four);
    if (bind(socket.fd(), address, family == AF_INET6 ? sizeof six : sizeof four) == 0 &&
        listen(socket.fd(), SOMAXCONN) == 0) {
      return socket.release();
    }
    if (family == AF_INET6 && (errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT)) continue;
    throw BadConfig("MASTER_PORT={}: rank 0 cannot listen there: {}; give a free port of its host", port,
                    std::strerror(errno));
  }
  throw BadConfig("MASTER_PORT={}: rank 0 cannot listen there: {}", port, std::strerror(errno));
}

int port_of(int socket) {
  sockaddr_storage own = {};
  socklen_t length = sizeof own;
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&own), &length) != 0) {
    throw Bug("no address of a socket: {}", std::strerror(errno));
  }
  return ntohs(own.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(own).sin6_port
                                         : reinterpret_cast<sockaddr_in&>(own).sin_port);
}

Reached reach(const std::string& addr, int port, Clock::time_point deadline) {
  const Clock::time_point start = Clock::now();
  std::string problem;
  while (true) {
    // Asked again each time: the name of a pod that starts is not known at first.
    const Addresses found = resolve(addr, port, SOCK_STREAM, 0, problem);
    for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
      const Socket socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (socket.fd() < 0) {
        problem = std::strerror(errno);
        continue;
      }
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      problem = try_connect(socket.fd(), *one, std::clamp(left, milliseconds(1), milliseconds(5000)));
      if (problem.empty()) return {own_address(socket.fd()), numeric(one->ai_addr, one->ai_addrlen)};
    }
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(std::min<Clock::duration>(milliseconds(100), deadline - Clock::now()));
  }
  throw BadConfig(
      "MASTER_ADDR={} MASTER_PORT={}: {} for {:.0f} s (comm.init_timeout_seconds); rank 0 listens there, on "
      "its "
      "own host",
      addr, port, problem, std::chrono::duration<double>(Clock::now() - start).count());
}

bool is_loopback(const std::string& address) {
  return address.starts_with("127.") || address == "::1" || address.starts_with("::ffff:127.");
}

std::string address_towards(const std::string& address) {
  std::string problem;
  const Addresses found = resolve(address, 9, SOCK_DGRAM, AI_NUMERICHOST, problem);
  if (!found) return "";
  const Socket socket(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));  // connects, sends nothing
  if (socket.fd() < 0 || connect(socket.fd(), found->ai_addr, found->ai_addrlen) != 0) return "";
  return own_address(socket.fd());
}

}  // namespace titanium
