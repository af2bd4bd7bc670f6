#include "titanium/serve/watch.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace titanium {
namespace {

// Empty where the client has no process of this machine's, or the kernel knows no pidfds.
Fd peer_process(const Connection& connection) {
  ucred credentials{};
  socklen_t bytes = sizeof credentials;
  if (!connection.is_unix() ||
      ::getsockopt(connection.fd(), SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0 ||
      credentials.pid <= 0 || credentials.pid == ::getpid()) {
    return {};
  }
  return Fd(static_cast<int>(::syscall(SYS_pidfd_open, credentials.pid, 0)));
}

}  // namespace

Watch::Watch(Connection& connection, WatchOptions options)
    : connection_(connection),
      options_(std::move(options)),
      peer_(peer_process(connection)),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) throw Bug("watch: eventfd: {}", std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

Watch::~Watch() {
  const uint64_t one = 1;
  if (::write(stop_.get(), &one, sizeof one) != sizeof one)
    std::terminate();  // an eventfd takes 2^64 - 2 of them
  thread_.join();
}

void Watch::run() {
  enum { kStop, kClient, kPeer, kSignals, kListener, kCount };
  pollfd polls[kCount] = {{stop_.get(), POLLIN, 0},
                          {connection_.fd(), POLLRDHUP, 0},
                          {peer_.get(), POLLIN, 0},
                          {options_.signals, POLLIN, 0},
                          {options_.listener ? options_.listener->fd() : -1, POLLIN, 0}};
  std::string why;
  while (why.empty()) {
    if (::poll(polls, kCount, -1) < 0 && errno != EINTR) why = "poll failed";
    if ((polls[kStop].revents & POLLIN) != 0) return;
    if (polls[kClient].revents != 0 || polls[kPeer].revents != 0) why = "the client is gone";
    if (polls[kSignals].revents != 0) why = "a signal asked the server to end";
    if (polls[kListener].revents != 0 && why.empty()) refuse();
  }
  const auto deadline = std::chrono::steady_clock::now() + options_.grace;
  if (options_.cuts) options_.cuts(why);
  connection_.shutdown();
  if (options_.lost) options_.lost(why);
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())
            .count();
    if (left <= 0) break;
    const int ready = ::poll(polls, 1, static_cast<int>(left));
    if (ready == 1) return;
    if (ready < 0 && errno != EINTR) break;
  }
  if (options_.give_up) options_.give_up(why);
  ::poll(polls, 1, -1);  // where the process goes on after all
}

void Watch::refuse() {
  Fd client = options_.listener->accept();
  if (!client) return;
  try {
    Connection connection(std::move(client));
    connection.send(Message::error_to(0, name(ErrorKind::kBadConfig),
                                      "the server has a client already; it serves one at a time"));
  } catch (const PeerGone&) {  // it left before it heard
  }
}

}  // namespace titanium
