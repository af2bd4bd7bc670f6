#include "titanium/weights/shared_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "titanium/base/error.h"

namespace titanium {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* what) {
  const int error = errno;
  throw BadCheckpoint("{}: {}: {}", path.string(), what, std::strerror(error));
}

}  // namespace

void SharedFile::create(const std::filesystem::path& path, std::string_view head, uint64_t size, bool fsync) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) fail(path, "cannot be created");
  const bool sized = ::ftruncate(fd, static_cast<off_t>(size)) == 0;
  const int error = errno;
  ::close(fd);
  errno = error;
  if (!sized) fail(path, "cannot be given its size");
  SharedFile file(path);
  file.write(std::as_bytes(std::span(head)), 0);
  if (fsync) file.sync();
}

// Only to write: a network file system then sends just the bytes that were written, not whole pages.
SharedFile::SharedFile(std::filesystem::path path)
    : path_(std::move(path)), fd_(::open(path_.c_str(), O_WRONLY | O_CLOEXEC)) {
  if (fd_ < 0) fail(path_, "cannot be opened to write");
}

SharedFile::~SharedFile() {
  if (fd_ >= 0) ::close(fd_);
}

void SharedFile::write(std::span<const std::byte> bytes, uint64_t at) {
  while (!bytes.empty()) {
    const ssize_t n =
        ::pwrite(fd_, bytes.data(), std::min<size_t>(bytes.size(), 1 << 30), static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(path_, "cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(n));
    at += static_cast<uint64_t>(n);
  }
}

void SharedFile::sync() {
  if (::fsync(fd_) != 0) fail(path_, "cannot be flushed to disk");
}

}  // namespace titanium
