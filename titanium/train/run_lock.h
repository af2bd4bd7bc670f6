// One run at a time in a dump folder.
#pragma once
#include <filesystem>

namespace titanium {

// Held from construction to destruction; the kernel lets go of it when the process dies, however it dies.
class RunLock {
 public:
  // Makes the folder where it is not there.  BadConfig: another run has it (its process is named), or it
  // cannot be made or written.
  explicit RunLock(std::filesystem::path folder);
  ~RunLock();  // a folder that it made and that is empty goes too
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  std::filesystem::path folder_, file_;
  bool made_ = false;
  int fd_ = -1;
};

}  // namespace titanium
