// Safetensors files: 8 bytes of header length (little endian), a JSON header, then the tensors' bytes.
// https://huggingface.co/docs/safetensors
//
// Reading maps the file: opening touches the header only, a tensor's bytes are read when they are used. Every
// failure is a BadCheckpoint that names the file, the tensor where there is one, and the reason.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "titanium/formats/dtype.h"

namespace titanium {

class MappedFile;

struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;  // [] is a scalar

  int64_t count() const;    // elements; BadCheckpoint for a negative size or a product over 2^63
  uint64_t nbytes() const;  // the same in bytes
};

// Bytes that the file owns: valid while the SafetensorsFile (or a copy of it) lives.  Not necessarily aligned
// for dtype: read through memcpy or convert().
struct TensorView {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;
  const std::byte* data = nullptr;
  uint64_t nbytes = 0;

  int64_t count() const;  // elements
  TensorView rows(int64_t begin,
                  int64_t end) const;  // [begin, end) of the first dimension; no byte is touched
};

using Metadata = std::map<std::string, std::string>;

class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  // A file that is in memory already; the caller keeps `bytes` alive.  `source` is what messages call it.
  static SafetensorsFile from_bytes(std::span<const std::byte> bytes, const std::string& source);

  const std::string& source() const { return source_; }
  const std::vector<TensorView>& tensors() const { return tensors_; }  // in the order of their bytes
  const Metadata& metadata() const { return metadata_; }               // the header's "__metadata__"
  const TensorView* find(std::string_view name) const;                 // nullptr when absent
  const TensorView& at(std::string_view name) const;                   // BadCheckpoint when absent

 private:
  SafetensorsFile() = default;
  void parse(std::span<const std::byte> bytes);

  std::string source_;
  std::shared_ptr<const MappedFile> file_;
  std::vector<TensorView> tensors_;
  std::unordered_map<std::string, size_t> index_;
  Metadata metadata_;
};

// Writes a file front to back.  The header is laid out from the specs, in their order (give wider dtypes
// first, so that every tensor is aligned); then append() takes the bytes in the same order, in pieces of any
// size.  The file gets its name in close(); without a close(), or after an error, nothing is left and an
// older file stays.
class SafetensorsWriter {
 public:
  struct Options {
    bool fsync = true;  // close() returns when file and name are on disk
  };

  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> specs,
                    const Metadata& metadata, Options options);
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> specs,
                    const Metadata& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void append(
      std::span<const std::byte> bytes);  // BadCheckpoint: more than the specs say, or the disk refuses
  void close();                           // BadCheckpoint: less than the specs say, or the disk refuses

 private:
  void flush();
  void write_all(std::span<const std::byte> bytes);
  void discard();
  [[noreturn]] void fail(const char* what, int error);

  std::filesystem::path path_, partial_;
  Options options_;
  int fd_ = -1;
  uint64_t expected_ = 0, given_ = 0;  // bytes of tensors
  std::vector<std::byte> buffer_;
};

// All at once; tensors are written in order of dtype width, widest first, otherwise as given.
void write_safetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                       const Metadata& metadata = {}, SafetensorsWriter::Options options = {true});

// The same layout as bytes in memory, e.g. for a message on a socket.
std::string safetensors_header(std::span<const TensorSpec> specs, const Metadata& metadata);

}  // namespace titanium
