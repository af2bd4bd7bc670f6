#include "titanium/report/files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "titanium/base/error.h"

namespace titanium {

void make_folder(const std::filesystem::path& folder) {
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw BadConfig("{}: cannot make the folder: {}", folder.string(), error.message());
}

bool append_whole(int fd, std::string_view bytes) {
  const off_t before = lseek(fd, 0, SEEK_END);
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n = ::write(fd, bytes.data() + done, bytes.size() - done);
    if (n > 0) {
      done += static_cast<size_t>(n);
    } else if (n == 0 || errno != EINTR) {
      // Take back the half record.  A pipe has no `before`: what it took is gone.
      const bool cut = done == 0 || before < 0 || ftruncate(fd, before) == 0;
      static_cast<void>(cut);
      return false;
    }
  }
  return true;
}

}  // namespace titanium
