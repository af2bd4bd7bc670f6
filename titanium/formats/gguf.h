// GGUF files, versions 2 and 3, little endian: typed metadata, then tensors, some of them quantised in
// blocks. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
//
// The file is mapped.  Every failure is a BadCheckpoint that names the file, the key or tensor, and the
// reason.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace titanium {

class MappedFile;

// Numbered as in the file.  A tensor of any other type is refused by its name when the file is opened.
enum class GgmlType : uint32_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, BF16 = 30 };
const char* name(GgmlType type);

struct GgufValue {
  using Array = std::vector<GgufValue>;
  // Unsigned, signed: all widths.  Strings point into the file.
  std::variant<bool, uint64_t, int64_t, float, double, std::string_view, Array> data;
};

struct GgufTensor {
  std::string name;
  GgmlType type = GgmlType::F32;
  std::vector<int64_t> shape;  // rows first, as torch writes it: the file's dimensions reversed
  const std::byte* data = nullptr;
  uint64_t nbytes = 0;

  int64_t columns() const;  // the last dimension, along which blocks lie; 1 for a scalar
  int64_t rows() const;     // all other dimensions together

  // Rows [begin, end) as floats, [end - begin, columns()].
  void dequantize(int64_t begin, int64_t end, float* out) const;
};

class GgufFile {
 public:
  explicit GgufFile(const std::filesystem::path& path);
  // A file in memory; the caller keeps `bytes` alive.  `source` is what messages call it.
  static GgufFile from_bytes(std::span<const std::byte> bytes, const std::string& source);

  const std::string& source() const { return source_; }
  uint32_t version() const { return version_; }
  const std::map<std::string, GgufValue, std::less<>>& metadata() const { return metadata_; }
  const std::vector<GgufTensor>& tensors() const { return tensors_; }  // as listed in the file
  const GgufTensor* find_tensor(std::string_view name) const;          // nullptr when absent

  // A key's value; empty when the key is absent, BadCheckpoint when it has another type or does not fit.
  std::optional<int64_t> integer(std::string_view key) const;
  std::optional<double> number(
      std::string_view key) const;  // a 32-bit float as its shortest decimal: 1e-5 stays 1e-5
  std::optional<bool> boolean(std::string_view key) const;
  std::optional<std::string_view> string(std::string_view key) const;
  std::optional<std::vector<std::string_view>> strings(std::string_view key) const;
  std::optional<std::vector<int64_t>> integers(std::string_view key) const;

 private:
  GgufFile() = default;
  void parse(std::span<const std::byte> bytes);
  const GgufValue* find(std::string_view key) const;

  std::string source_;
  std::shared_ptr<const MappedFile> file_;
  uint32_t version_ = 0;
  std::map<std::string, GgufValue, std::less<>> metadata_;
  std::vector<GgufTensor> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
};

}  // namespace titanium
