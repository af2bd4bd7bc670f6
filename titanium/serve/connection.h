// One end of a socket that carries messages.
#pragma once
#include <optional>
#include <stdexcept>
#include <utility>

#include "titanium/serve/wire.h"

namespace titanium {

// A descriptor that is closed with its owner.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// The other side closed the connection or died.
class PeerGone : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Calls come from one thread; shutdown() may come from any.
class Connection {
 public:
  explicit Connection(Fd fd);  // a connected stream socket; BadConfig when it is none

  // A blob over this size goes into a sealed memfd, where the socket can pass one (not over TCP).
  static constexpr uint64_t kInlineBytes = uint64_t{1} << 20;

  void send(Message message);  // PeerGone

  // The next message; empty when the peer has closed between two.  BadData: it sent something that is no
  // message, after which the stream has no meaning any more.  PeerGone: it closed or died inside one.
  std::optional<Message> receive();

  void shutdown();  // both directions: a call that waits in another thread returns
  int fd() const { return fd_.get(); }
  bool is_unix() const { return is_unix_; }

 private:
  Fd fd_;
  bool is_unix_ = false;
};

}  // namespace titanium
