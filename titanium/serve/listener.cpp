#include "titanium/serve/listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstring>

namespace titanium {
namespace {

constexpr const char* kForms = "allowed: unix:/path, unix:@name, tcp:127.0.0.1:PORT, tcp:[::1]:PORT";

Fd stream_socket(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) throw BadConfig("listen: no socket can be made: {}", std::strerror(errno));
  return fd;
}

struct UnixName {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

UnixName unix_name(const std::string& path) {
  UnixName name;
  name.address.sun_family = AF_UNIX;
  if (path.empty() || path == "@" || path.size() >= sizeof name.address.sun_path) {
    throw BadConfig("listen: the socket's path '{}' has {} bytes, allowed are 1 to {}", path, path.size(),
                    sizeof name.address.sun_path - 1);
  }
  std::memcpy(name.address.sun_path, path.data(), path.size());
  name.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  if (path[0] == '@') {
    name.address.sun_path[0] = '\0';
  } else {
    ++name.bytes;
  }
  return name;
}

// True when nobody listens behind an existing socket file.
bool is_dead(const UnixName& name) {
  const Fd probe = stream_socket(AF_UNIX);
  return ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&name.address), name.bytes) != 0 &&
         errno == ECONNREFUSED;
}

}  // namespace

Listener::Listener(const std::string& address) : address_(address) {
  if (address.starts_with("unix:")) {
    bind_unix(address.substr(5));
  } else if (address.starts_with("tcp:")) {
    bind_tcp(address.substr(4));
  } else {
    throw BadConfig("listen: '{}' is not an address; {}", address, kForms);
  }
  if (::listen(fd_.get(), 8) != 0) throw BadConfig("listen: {}: {}", address, std::strerror(errno));
}

Listener::~Listener() {
  remove_file();
}

void Listener::remove_file() noexcept {
  if (!path_.empty()) ::unlink(path_.c_str());
}

void Listener::bind_unix(const std::string& path) {
  const UnixName name = unix_name(path);
  fd_ = stream_socket(AF_UNIX);
  const auto bind = [&] {
    const mode_t mask = ::umask(0177);  // no moment in which others may connect
    const int failed = ::bind(fd_.get(), reinterpret_cast<const sockaddr*>(&name.address), name.bytes);
    const int error = errno;
    ::umask(mask);
    errno = error;
    return failed == 0;
  };
  bool bound = bind();
  if (!bound && errno == EADDRINUSE && path[0] != '@' && is_dead(name)) {
    ::unlink(path.c_str());
    bound = bind();
  }
  if (!bound) {
    throw BadConfig("listen: unix:{}: {}", path,
                    errno == EADDRINUSE ? "another process listens there, or the file is no socket"
                                        : std::strerror(errno));
  }
  if (path[0] != '@') path_ = path;
}

void Listener::bind_tcp(const std::string& host_and_port) {
  const size_t colon = host_and_port.rfind(':');
  uint16_t port = 0;
  const auto bad = [&] { return BadConfig("listen: 'tcp:{}' is not an address; {}", host_and_port, kForms); };
  if (colon == std::string::npos) throw bad();
  const std::string host = host_and_port.substr(0, colon), digits = host_and_port.substr(colon + 1);
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), port);
  if (error != std::errc() || digits.empty() || end != digits.data() + digits.size()) throw bad();

  sockaddr_storage storage{};
  socklen_t bytes = 0;
  if (host == "[::1]") {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_addr = in6addr_loopback;
    v6->sin6_port = htons(port);
    bytes = sizeof *v6;
  } else {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    bytes = sizeof *v4;
    const std::string name = host == "localhost" ? "127.0.0.1" : host;
    if (::inet_pton(AF_INET, name.c_str(), &v4->sin_addr) != 1 || !name.starts_with("127.")) {
      throw BadConfig("listen: 'tcp:{}' is not a loopback address; {}", host_and_port, kForms);
    }
  }
  fd_ = stream_socket(storage.ss_family);
  const int on = 1;
  ::setsockopt(fd_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (::bind(fd_.get(), reinterpret_cast<sockaddr*>(&storage), bytes) != 0 ||
      ::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&storage), &bytes) != 0) {
    throw BadConfig("listen: tcp:{}: {}", host_and_port, std::strerror(errno));
  }
  const uint16_t taken =
      ntohs(storage.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&storage)->sin_port);
  address_ = fmt::format("tcp:{}:{}", host, taken);
}

Fd Listener::accept() {
  Fd client(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
  if (!client) return client;
  if (address_.starts_with("unix:")) {
    ucred credentials{};
    socklen_t bytes = sizeof credentials;
    if (::getsockopt(client.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0 ||
        credentials.uid != ::geteuid()) {
      return {};
    }
  } else {
    const int on = 1;
    ::setsockopt(client.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  return client;
}

}  // namespace titanium
