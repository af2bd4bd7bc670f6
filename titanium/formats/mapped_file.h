// A file mapped read-only.  Pages are read when they are touched.
#pragma once
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace titanium {

class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);  // BadCheckpoint with path and the system's reason
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace titanium
