#include "titanium/train/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// The number that its owner has written into a lock file; empty where it could not.
std::string owner_of(int fd) {
  char text[32] = {};
  const ssize_t n = ::pread(fd, text, sizeof text - 1, 0);
  return n > 0 ? fmt::format(" (process {})", std::string(text, text + std::strcspn(text, "\n"))) : "";
}

// Another process may have taken the file away between its opening here and the lock.
bool is_still(int fd, const std::filesystem::path& file) {
  struct stat held, there;
  return ::fstat(fd, &held) == 0 && ::stat(file.c_str(), &there) == 0 && held.st_ino == there.st_ino &&
         held.st_dev == there.st_dev;
}

}  // namespace

RunLock::RunLock(std::filesystem::path folder) : folder_(std::move(folder)), file_(folder_ / ".lock") {
  std::error_code error;
  made_ = std::filesystem::create_directories(folder_, error);
  if (error) throw BadConfig("dump_folder = {}: cannot be made: {}", folder_.string(), error.message());
  while (true) {
    fd_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
    if (fd_ < 0) throw BadConfig("{}: cannot be opened: {}", file_.string(), std::strerror(errno));
    // A file system without locks is used without one.
    if (::flock(fd_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      const std::string owner = owner_of(fd_);
      ::close(fd_);
      throw BadConfig("dump_folder = {}: another run{} writes there; wait for it, or give another folder",
                      folder_.string(), owner);
    }
    if (is_still(fd_, file_)) break;
    ::close(fd_);
  }
  // For the message above; a full disk only leaves the number out.
  const std::string pid = std::to_string(::getpid()) + "\n";
  const bool written = ::ftruncate(fd_, 0) == 0 && ::pwrite(fd_, pid.data(), pid.size(), 0) > 0;
  static_cast<void>(written);
}

RunLock::~RunLock() {
  ::unlink(file_.c_str());
  ::close(fd_);
  if (made_) ::rmdir(folder_.c_str());
}

}  // namespace titanium
