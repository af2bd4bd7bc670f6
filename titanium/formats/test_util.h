// For the tests of this room: a folder that goes away, errors as text, and GGUF files made byte by byte.
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "titanium/base/error.h"

namespace titanium::testing {

class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "titanium-formats-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder: " + name);
    path_ = name;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }
  size_t files() const {
    return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(path_), {}));
  }

 private:
  std::filesystem::path path_;
};

inline void put(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::span<const std::byte> as_span(std::string_view bytes) {
  return std::as_bytes(std::span(bytes));
}

// "BadCheckpoint: <message>" of what f throws, or "nothing".
template <typename F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Error& error) {
    return std::string(name(error.kind())) + ": " + error.what();
  }
  return "nothing";
}

#define EXPECT_SAYS(text, part) \
  EXPECT_NE((text).find(part), std::string::npos) << "  got:    " << (text) << "\n  wanted: " << (part)

template <typename T>
std::string raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

inline std::string raw_string(std::string_view text) {
  return raw(uint64_t{text.size()}) + std::string(text);
}

// The format of the specification, independent of the reader: keys and tensors in the order given.
class GgufBuilder {
 public:
  uint32_t version = 3;
  uint64_t alignment = 32;

  GgufBuilder& key(std::string_view name, uint32_t type, std::string_view value) {
    keys_ += raw_string(name) + raw(type) + std::string(value);
    ++key_count_;
    return *this;
  }
  GgufBuilder& u32(std::string_view name, uint32_t value) { return key(name, 4, raw(value)); }
  GgufBuilder& f32(std::string_view name, float value) { return key(name, 6, raw(value)); }
  GgufBuilder& boolean(std::string_view name, bool value) {
    return key(name, 7, std::string(1, char(value)));
  }
  GgufBuilder& text(std::string_view name, std::string_view value) { return key(name, 8, raw_string(value)); }
  GgufBuilder& texts(std::string_view name, const std::vector<std::string>& values) {
    std::string body = raw(uint32_t{8}) + raw(uint64_t{values.size()});
    for (const auto& value : values) body += raw_string(value);
    return key(name, 9, body);
  }
  GgufBuilder& i32s(std::string_view name, const std::vector<int32_t>& values) {
    std::string body = raw(uint32_t{5}) + raw(uint64_t{values.size()});
    for (const int32_t value : values) body += raw(value);
    return key(name, 9, body);
  }

  // `shape` is rows first; the file holds it reversed.
  GgufBuilder& tensor(std::string_view name, uint32_t type, std::vector<int64_t> shape,
                      std::string_view data) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    return tensor_at(name, type, std::move(shape), data_.size(), data);
  }
  GgufBuilder& tensor_at(std::string_view name, uint32_t type, std::vector<int64_t> shape, uint64_t offset,
                         std::string_view data) {
    infos_ += raw_string(name) + raw(static_cast<uint32_t>(shape.size()));
    for (size_t i = shape.size(); i-- > 0;) infos_ += raw(shape[i]);
    infos_ += raw(type) + raw(offset);
    data_ += data;
    ++tensor_count_;
    return *this;
  }

  std::string bytes() const {
    std::string out = "GGUF" + raw(version) + raw(tensor_count_) + raw(key_count_) + keys_ + infos_;
    if (tensor_count_ > 0) out.resize((out.size() + alignment - 1) / alignment * alignment);
    return out + data_;
  }

 private:
  std::string keys_, infos_, data_;
  uint64_t key_count_ = 0, tensor_count_ = 0;
};

}  // namespace titanium::testing
