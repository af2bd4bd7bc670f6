// Data files for the tests of this room.
#pragma once
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace titanium {

// A folder that is removed at the end.
class TestFolder {
 public:
  explicit TestFolder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              ("titanium_" + name + "_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  std::string write(const std::string& name, const std::string& text) const {
    const auto file = path_ / name;
    std::ofstream(file, std::ios::binary) << text;
    return file.string();
  }
  std::string path(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// n records of input_ids: record i is [i, 1, 2, ...] of 1 + i % 7 + 1 tokens, the first of them not trained.
inline std::string numbered_records(int n) {
  std::string text;
  for (int i = 0; i < n; ++i) {
    std::string ids = std::to_string(i), mask = "0";
    for (int t = 1; t <= 1 + i % 7; ++t) {
      ids += fmt::format(",{}", t);
      mask += ",1";
    }
    text += fmt::format("{{\"input_ids\":[{}],\"loss_mask\":[{}]}}\n", ids, mask);
  }
  return text;
}

}  // namespace titanium
