#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/formats/safetensors.h"

namespace titanium {
namespace {

constexpr size_t kBuffer = 1 << 20;  // small pieces are gathered; larger ones go straight to the file

}  // namespace

std::string safetensors_header(std::span<const TensorSpec> specs, const Metadata& metadata) {
  std::string text = "{";
  const auto quote = [](const std::string& name, const std::string& value) {
    try {
      return Json(value).dump();
    } catch (const Json::exception&) {
      throw BadCheckpoint("tensor or metadata name '{}': not valid UTF-8", name);
    }
  };
  if (!metadata.empty()) {
    text += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (text.back() != '{') text += ',';
      text.append(quote(key, key)).append(":").append(quote(key, value));
    }
    text += "}";
  }
  std::unordered_set<std::string_view> seen = {"__metadata__"};
  uint64_t at = 0;
  for (const TensorSpec& spec : specs) {
    if (!seen.insert(spec.name).second) {
      throw BadCheckpoint("tensor '{}' cannot be written: the name is used twice, or reserved", spec.name);
    }
    const uint64_t bytes = spec.nbytes();
    uint64_t end = 0;
    if (__builtin_add_overflow(at, bytes, &end))
      throw BadCheckpoint("tensor '{}': sizes overflow", spec.name);
    if (text.back() != '{') text += ',';
    text += quote(spec.name, spec.name);
    text += fmt::format(":{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}", name(spec.dtype),
                        Json(spec.shape).dump(), at, end);
    at = end;
  }
  text += "}";
  while (text.size() % 8 != 0) text += ' ';  // so that the data begins at a multiple of 8

  std::string head(8, '\0');
  for (int i = 0; i < 8; ++i) head[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return head + text;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> specs,
                                     const Metadata& metadata)
    : SafetensorsWriter(path, std::move(specs), metadata, Options{}) {}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> specs,
                                     const Metadata& metadata, Options options)
    : path_(path), partial_(path), options_(options) {
  static std::atomic<uint64_t> count{0};  // keeps the names of two threads apart, nothing else
  partial_ += fmt::format(".partial-{}-{}", ::getpid(), count.fetch_add(1));
  std::string header;
  try {
    header = safetensors_header(specs, metadata);
  } catch (const BadCheckpoint& error) {
    throw BadCheckpoint("{}: {}", path_.string(), error.what());
  }
  for (const TensorSpec& spec : specs) expected_ += spec.nbytes();
  buffer_.reserve(kBuffer);
  fd_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd_ < 0) fail("cannot be created", errno);
  const auto bytes = std::as_bytes(std::span(header));
  buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
}

SafetensorsWriter::~SafetensorsWriter() {
  discard();
}

void SafetensorsWriter::discard() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(partial_.c_str());
  fd_ = -1;
}

void SafetensorsWriter::fail(const char* what, int error) {
  discard();
  throw BadCheckpoint("{}: {}: {}", path_.string(), what, std::strerror(error));
}

void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  if (fd_ < 0) throw Bug("{}: append to a file that is closed", path_.string());
  if (bytes.size() > expected_ - given_) {
    discard();
    throw BadCheckpoint("{}: more than the {} bytes that its tensors have were given", path_.string(),
                        expected_);
  }
  given_ += bytes.size();
  if (buffer_.size() + bytes.size() > kBuffer) flush();
  if (bytes.size() < kBuffer) {
    buffer_.insert(buffer_.end(), bytes.begin(), bytes.end());
    return;
  }
  write_all(bytes);
}

void SafetensorsWriter::flush() {
  write_all(buffer_);
  buffer_.clear();
}

void SafetensorsWriter::write_all(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd_, bytes.data(), std::min<size_t>(bytes.size(), 1 << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot be written", errno);
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

void SafetensorsWriter::close() {
  if (fd_ < 0) throw Bug("{}: close of a file that is closed", path_.string());
  if (given_ != expected_) {
    discard();
    throw BadCheckpoint("{}: {} bytes of tensors were given, {} are needed", path_.string(), given_,
                        expected_);
  }
  flush();
  if (options_.fsync && ::fsync(fd_) != 0) fail("cannot be flushed to disk", errno);
  const int fd = std::exchange(fd_, -1);
  if (::close(fd) != 0 || ::rename(partial_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(partial_.c_str());
    fail("cannot be put in place", error);
  }
  if (options_.fsync) {
    const auto folder = path_.parent_path();
    sync_folder(folder.empty() ? "." : folder);
  }
}

void write_safetensors(const std::filesystem::path& path, std::span<const TensorView> tensors,
                       const Metadata& metadata, SafetensorsWriter::Options options) {
  std::vector<const TensorView*> order;
  for (const TensorView& tensor : tensors) order.push_back(&tensor);
  std::stable_sort(order.begin(), order.end(), [](const TensorView* a, const TensorView* b) {
    return size_of(a->dtype) > size_of(b->dtype);
  });
  std::vector<TensorSpec> specs;
  for (const TensorView* tensor : order) {
    specs.push_back({tensor->name, tensor->dtype, tensor->shape});
    if (specs.back().nbytes() != tensor->nbytes) {
      throw BadCheckpoint("{}: tensor '{}' has {} bytes, its shape needs {}", path.string(), tensor->name,
                          tensor->nbytes, specs.back().nbytes());
    }
  }
  SafetensorsWriter writer(path, std::move(specs), metadata, options);
  for (const TensorView* tensor : order) writer.append({tensor->data, tensor->nbytes});
  writer.close();
}

}  // namespace titanium
