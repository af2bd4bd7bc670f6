// A file that several ranks write at once, each its own bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string_view>

namespace titanium {

class SharedFile {
 public:
  // Made new, with `head` at its begin and `size` bytes in all; by one rank, before the others open it.  With
  // fsync that much is on disk when it returns.
  static void create(const std::filesystem::path& path, std::string_view head, uint64_t size, bool fsync);
  explicit SharedFile(std::filesystem::path path);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  void write(std::span<const std::byte> bytes, uint64_t at);
  void sync();  // returns when what was written is on disk
                // All throw BadCheckpoint with path and the system's reason.

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace titanium
