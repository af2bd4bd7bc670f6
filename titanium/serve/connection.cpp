#include "titanium/serve/connection.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace titanium {
namespace {

constexpr size_t kPieces = 256;           // iovecs of one system call; the kernel takes up to 1024
constexpr uint64_t kFirstStep = 1 << 16;  // a length is only believed as its bytes arrive
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_WRITE;

// Calls `write(iovecs, count)` until every piece is written; it returns bytes, or -1 with errno.
template <typename Write>
bool write_all(std::vector<iovec> pieces, const Write& write) {
  size_t at = 0;
  while (true) {
    while (at < pieces.size() && pieces[at].iov_len == 0) ++at;
    if (at == pieces.size()) return true;
    ssize_t n = write(&pieces[at], std::min(kPieces, pieces.size() - at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    while (n > 0) {
      const size_t step = std::min(static_cast<size_t>(n), pieces[at].iov_len);
      pieces[at].iov_base = static_cast<char*>(pieces[at].iov_base) + step;
      pieces[at].iov_len -= step;
      n -= static_cast<ssize_t>(step);
      if (pieces[at].iov_len == 0) ++at;
    }
  }
}

iovec piece(const void* data, size_t bytes) {
  return {const_cast<void*>(data), bytes};
}

// The pieces end to end in a memfd that can change no more; empty where the system gives none.
Fd sealed(const std::vector<iovec>& pieces) {
  Fd fd(::memfd_create("titanium", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fd;
  const auto write = [&](const iovec* at, size_t count) {
    return ::writev(fd.get(), at, static_cast<int>(count));
  };
  if (!write_all(pieces, write)) return {};
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals | F_SEAL_GROW | F_SEAL_SEAL) != 0) return {};
  return fd;
}

// Maps a memfd of exactly `bytes` bytes.
std::shared_ptr<const void> map_sealed(const Fd& fd, uint64_t bytes) {
  // Without the seals the sender could cut the file under our feet, and a read would be a SIGBUS.
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals) {
    throw BadData("message: its descriptor is not a memfd sealed against shrinking and writing");
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0 || static_cast<uint64_t>(info.st_size) != bytes) {
    throw BadData("message: its memfd has {} bytes, the frame says {}", info.st_size, bytes);
  }
  if (bytes == 0) throw BadData("message: its memfd is empty");
  void* data = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_POPULATE, fd.get(), 0);
  if (data == MAP_FAILED) throw BadData("message: its memfd cannot be mapped: {}", std::strerror(errno));
  return {data, [bytes](const void* p) { ::munmap(const_cast<void*>(p), bytes); }};
}

// Fills `out`; descriptors that come along are added to `fds`.  False at the end of the stream before the
// first byte.
bool read_all(int socket, std::span<std::byte> out, std::vector<Fd>* fds) {
  size_t done = 0;
  while (done < out.size()) {
    iovec buffer{out.data() + done, out.size() - done};
    alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
    msghdr header{};
    header.msg_iov = &buffer;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    const ssize_t n = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw PeerGone(std::string("the connection broke: ") + std::strerror(errno));
    for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof fd);
        Fd owned(fd);
        if (fds != nullptr) fds->push_back(std::move(owned));
      }
    }
    if ((header.msg_flags & MSG_CTRUNC) != 0)
      throw BadData("message: more descriptors than a message may pass");
    if (n == 0 && done == 0) return false;
    if (n == 0) throw PeerGone("the connection ended inside a message");
    done += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

Fd::~Fd() {
  if (fd_ >= 0) ::close(fd_);
}

Connection::Connection(Fd fd) : fd_(std::move(fd)) {
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  int type = 0;
  socklen_t type_bytes = sizeof type;
  if (::getsockname(fd_.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0 ||
      ::getsockopt(fd_.get(), SOL_SOCKET, SO_TYPE, &type, &type_bytes) != 0 || type != SOCK_STREAM) {
    throw BadConfig("descriptor {} is not a stream socket", fd_.get());
  }
  is_unix_ = address.ss_family == AF_UNIX;
}

void Connection::send(Message message) {
  const std::string head = encode_header(message);
  std::vector<iovec> pieces = {piece(nullptr, 0), piece(head.data(), head.size())};
  Frame frame{0, head.size()};
  for (const TensorView& view : message.tensors) {
    pieces.push_back(piece(view.data, view.nbytes));
    frame.bytes += view.nbytes;
  }
  if (frame.bytes > kMaxBlob) throw BadData("message: {} bytes, allowed are {}", frame.bytes, kMaxBlob);

  Fd memfd;
  if (is_unix_ && frame.bytes > kInlineBytes) memfd = sealed(pieces);
  if (memfd) {
    frame.fds = 1;
    pieces.resize(1);
  }
  const auto frame_bytes = encode_frame(frame);
  pieces[0] = piece(frame_bytes.data(), frame_bytes.size());

  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  bool pass = static_cast<bool>(memfd);
  const auto write = [&](iovec* at, size_t count) {
    msghdr header{};
    header.msg_iov = at;
    header.msg_iovlen = count;
    if (pass) {  // with the first byte
      header.msg_control = control;
      header.msg_controllen = sizeof control;
      cmsghdr* c = CMSG_FIRSTHDR(&header);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = memfd.get();
      std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    const ssize_t n = ::sendmsg(fd_.get(), &header, MSG_NOSIGNAL);
    if (n > 0) pass = false;
    return n;
  };
  if (!write_all(std::move(pieces), write)) {
    throw PeerGone(std::string("the connection broke: ") + std::strerror(errno));
  }
}

std::optional<Message> Connection::receive() {
  std::array<std::byte, kFrameBytes> frame_bytes;
  std::vector<Fd> fds;
  if (!read_all(fd_.get(), frame_bytes, &fds)) return {};
  const Frame frame = decode_frame(frame_bytes);
  if (fds.size() != frame.fds) {
    throw BadData("message: {} descriptors came, the frame says {}", fds.size(), frame.fds);
  }
  if (frame.fds == 1) {
    std::shared_ptr<const void> owner = map_sealed(fds[0], frame.bytes);
    const auto* data = static_cast<const std::byte*>(owner.get());
    return decode_message({data, frame.bytes}, std::move(owner));
  }
  auto blob = std::make_shared<std::vector<std::byte>>();
  for (uint64_t done = 0, step = kFirstStep; done < frame.bytes; step *= 2) {
    const uint64_t end = std::min(frame.bytes, done + step);
    blob->resize(end);
    if (!read_all(fd_.get(), std::span(*blob).subspan(done), nullptr)) {
      throw PeerGone("the connection ended inside a message");
    }
    done = end;
  }
  const std::span<const std::byte> bytes(*blob);
  return decode_message(bytes, std::move(blob));
}

void Connection::shutdown() {
  ::shutdown(fd_.get(), SHUT_RDWR);
}

}  // namespace titanium
