#include "titanium/dist/local_meet.h"

#include <fmt/ranges.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kMagic = 0x314e4954;  // "TIN1"
constexpr milliseconds kSlack{5000};     // for rank 0's word after the timeout: it names who is missing
constexpr const char* kKey = "comm.init_timeout_seconds";

struct Hello {
  uint32_t magic;
  int32_t rank, size;
};

class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

[[noreturn]] void system_error(const char* what) {
  throw Bug("meeting other ranks: {}: {}", what, std::strerror(errno));
}

// Packets keep their borders: one is a hello, or an answer.
Socket new_socket() {
  Socket socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (socket.fd() < 0) system_error("socket");
  return socket;
}

struct Address {
  sockaddr_un address = {};
  socklen_t size = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

Address address_of(const std::string& place) {
  const std::string name = fmt::format("titanium-{}-{}", ::getuid(), place);
  Address out;
  out.address.sun_family = AF_UNIX;
  // The first byte, a zero, says that it is not on disk.
  if (name.size() + 1 > sizeof out.address.sun_path) throw BadConfig("MASTER_ADDR is too long: {}", place);
  std::memcpy(out.address.sun_path + 1, name.data(), name.size());
  out.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return out;
}

bool same_user(const Socket& socket) {
  ucred peer = {};
  socklen_t size = sizeof peer;
  return ::getsockopt(socket.fd(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::getuid();
}

milliseconds left(Clock::time_point end) {
  return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(end - Clock::now()));
}

// An answer is the error's kind and message, or empty with the memory's file.
void answer(const Socket& socket, const std::string& text, int fd) {
  std::string bytes = text.empty() ? "+" : text;
  iovec part = {.iov_base = bytes.data(), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (text.empty()) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &fd, sizeof fd);
  }
  // One that is gone is missed soon enough.
  [[maybe_unused]] const ssize_t sent = ::sendmsg(socket.fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

// One that connected: its rank once it said hello.
struct Guest {
  Socket socket;
  int rank = -1;
};

// Reads hello.  False when the guest is gone, or no rank.
bool read_hello(Guest& guest, int size) {
  Hello hello = {};
  const ssize_t got = ::recv(guest.socket.fd(), &hello, sizeof hello, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
  if (guest.rank >= 0) {
    throw RankLost("rank {} ended while the ranks met", guest.rank);
  }
  if (got != sizeof hello || hello.magic != kMagic || !same_user(guest.socket)) return false;
  if (hello.size != size) {
    throw BadConfig("rank {} says that there are {} ranks, rank 0 that there are {}", hello.rank, hello.size,
                    size);
  }
  if (hello.rank < 0 || hello.rank >= size) throw BadConfig("a rank {} of {}", hello.rank, size);
  guest.rank = hello.rank;
  return true;
}

void welcome(const Socket& door, std::vector<Guest>& guests, int size, Clock::time_point end,
             double seconds) {
  std::vector<bool> here(size);
  here[0] = true;
  while (std::find(here.begin(), here.end(), false) != here.end()) {
    std::vector<pollfd> polls = {{.fd = door.fd(), .events = POLLIN, .revents = 0}};
    for (const Guest& guest : guests)
      polls.push_back({.fd = guest.socket.fd(), .events = POLLIN, .revents = 0});
    const int ready =
        ::poll(polls.data(), polls.size(), static_cast<int>(std::min<int64_t>(left(end).count(), 1000)));
    if (ready < 0 && errno != EINTR) system_error("poll");
    for (size_t i = guests.size(); i-- > 0;) {
      if (polls[i + 1].revents == 0) continue;
      const bool new_one = guests[i].rank < 0;
      if (!read_hello(guests[i], size)) {
        guests.erase(guests.begin() + static_cast<std::ptrdiff_t>(i));
      } else if (const int rank = guests[i].rank; new_one && rank >= 0) {
        if (here[rank]) throw BadConfig("two processes say that they are rank {}", rank);
        here[rank] = true;
      }
    }
    if (polls[0].revents != 0) {
      Socket guest(::accept4(door.fd(), nullptr, nullptr, SOCK_CLOEXEC));
      if (guest.fd() >= 0) guests.push_back({std::move(guest)});
    }
    if (ready <= 0 && Clock::now() >= end) {
      std::vector<int> missing;
      for (int rank = 0; rank < size; ++rank) {
        if (!here[rank]) missing.push_back(rank);
      }
      throw RankLost("rank{} {} did not come within {} s ({})", missing.size() == 1 ? "" : "s",
                     fmt::join(missing, ", "), seconds, kKey);
    }
  }
}

std::shared_ptr<LocalMemory> host(const Address& address, const std::string& place, int size,
                                  Clock::time_point end, double seconds) {
  const Socket door = new_socket();
  if (::bind(door.fd(), address.get(), address.size) != 0) {
    if (errno != EADDRINUSE) system_error("bind");
    throw BadConfig("another run on this host meets at {} already: give this one another MASTER_PORT", place);
  }
  if (::listen(door.fd(), kMaxLocalRanks) != 0) system_error("listen");
  std::vector<Guest> guests;
  std::string error;
  try {
    std::shared_ptr<LocalMemory> memory = LocalMemory::create(size);
    welcome(door, guests, size, end, seconds);
    for (const Guest& guest : guests) {
      if (guest.rank >= 0) answer(guest.socket, "", memory->fd());
    }
    return memory;
  } catch (const Error& e) {
    for (const Guest& guest : guests) {
      answer(guest.socket, static_cast<char>('0' + static_cast<int>(e.kind())) + std::string(e.what()), -1);
    }
    throw;
  }
}

std::optional<Socket> connect_to(const Address& address) {
  Socket socket = new_socket();
  if (::connect(socket.fd(), address.get(), address.size) == 0) return socket;
  if (errno != ECONNREFUSED && errno != EAGAIN && errno != EINTR) system_error("connect");
  return std::nullopt;
}

std::shared_ptr<LocalMemory> join(const Address& address, const std::string& place, int rank, int size,
                                  Clock::time_point end, double seconds) {
  std::optional<Socket> socket;
  while (!(socket = connect_to(address))) {
    if (Clock::now() >= end) {
      throw RankLost("rank 0 did not come to {} on this host within {} s ({})", place, seconds, kKey);
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
  if (!same_user(*socket))
    throw BadConfig("another user's run meets at {}: give this one another MASTER_PORT", place);
  const Hello hello = {.magic = kMagic, .rank = rank, .size = size};
  if (::send(socket->fd(), &hello, sizeof hello, MSG_NOSIGNAL) != sizeof hello) {
    throw RankLost("rank 0 ended while the ranks met");
  }
  pollfd poll = {.fd = socket->fd(), .events = POLLIN, .revents = 0};
  int ready = 0;
  while ((ready = ::poll(&poll, 1,
                         static_cast<int>(std::min<int64_t>(left(end + kSlack).count(), 60'000)))) <= 0) {
    if (ready < 0 && errno != EINTR) system_error("poll");
    if (Clock::now() >= end + kSlack) throw RankLost("rank 0 did not answer within {} s ({})", seconds, kKey);
  }
  char bytes[4096];
  iovec part = {.iov_base = bytes, .iov_len = sizeof bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket->fd(), &message, MSG_CMSG_CLOEXEC);
  if (got <= 0) throw RankLost("rank 0 ended while the ranks met");
  if (bytes[0] != '+') {
    const std::string text(bytes + 1, got - 1);
    if (bytes[0] == '0' + static_cast<int>(ErrorKind::kBadConfig)) throw BadConfig("{}", text);
    if (bytes[0] == '0' + static_cast<int>(ErrorKind::kRankLost)) throw RankLost("{}", text);
    throw Bug("{}", text);
  }
  const cmsghdr* head = CMSG_FIRSTHDR(&message);
  if (head == nullptr || head->cmsg_type != SCM_RIGHTS) throw Bug("rank 0 sent no memory");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
  std::shared_ptr<LocalMemory> memory = LocalMemory::open(fd);
  if (memory->ranks() != size) throw Bug("rank 0's memory is for {} ranks, not {}", memory->ranks(), size);
  return memory;
}

}  // namespace

std::shared_ptr<LocalMemory> meet_local(const std::string& place, int rank, int size, milliseconds timeout) {
  if (size > kMaxLocalRanks) {
    throw BadConfig("{} ranks on one host: comm.transport = local holds {}", size, kMaxLocalRanks);
  }
  const Address address = address_of(place);
  const Clock::time_point end = Clock::now() + timeout;
  const double seconds = static_cast<double>(timeout.count()) / 1000;
  return rank == 0 ? host(address, place, size, end, seconds)
                   : join(address, place, rank, size, end, seconds);
}

}  // namespace titanium
