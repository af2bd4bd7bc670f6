#include "titanium/formats/safetensors.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/formats/mapped_file.h"

namespace titanium {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation
constexpr int64_t kMaxCount = std::numeric_limits<int64_t>::max();

// Elements of a shape whose sizes are not negative; false when they do not fit.
bool product(const std::vector<int64_t>& shape, int64_t* out) {
  // A zero anywhere makes the product zero, yet a shape such as [2^62, 2^62, 0] is still refused.
  int64_t count = 1;
  bool empty = false;
  for (const int64_t size : shape) {
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(count, size, &count)) {
      return false;
    }
  }
  *out = empty ? 0 : count;
  return true;
}

uint64_t read_u64(const std::byte* at) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<uint64_t>(at[i]);
  return value;
}

struct Entry {
  TensorView view;
  uint64_t begin = 0, end = 0;  // in the data section
};

// One member of the header; the reason is thrown as text and given its file and tensor by the caller.
struct Lie {
  std::string reason;
};

Entry read_entry(const std::string& name, const Json& json) {
  if (!json.is_object()) throw Lie{fmt::format("is described by a {}, not an object", json.type_name())};
  for (const auto& item : json.items()) {
    if (item.key() != "dtype" && item.key() != "shape" && item.key() != "data_offsets") {
      throw Lie{fmt::format("has an unknown key '{}' (allowed: dtype, shape, data_offsets)", item.key())};
    }
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!json.contains(key)) throw Lie{fmt::format("has no '{}'", key)};
  }

  Entry entry;
  entry.view.name = name;
  const Json& dtype = json["dtype"];
  if (!dtype.is_string()) throw Lie{"has a dtype that is not a string"};
  const auto parsed = parse_dtype(dtype.get_ref<const std::string&>());
  // parse_dtype knows torch's spelling too; a file must use the format's own.
  if (!parsed || dtype.get_ref<const std::string&>() != titanium::name(*parsed)) {
    throw Lie{fmt::format(
        "has dtype '{}' (allowed: F64, F32, F16, BF16, I64, I32, I16, I8, U8, U16, U32, U64, BOOL)",
        dtype.get_ref<const std::string&>())};
  }
  entry.view.dtype = *parsed;

  const Json& shape = json["shape"];
  if (!shape.is_array()) throw Lie{"has a shape that is not a list"};
  for (const Json& size : shape) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > static_cast<uint64_t>(kMaxCount)) {
      throw Lie{fmt::format("has shape {}: a size must be an integer from 0 to 2^63-1", shape.dump())};
    }
    entry.view.shape.push_back(size.get<int64_t>());
  }

  const Json& offsets = json["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    throw Lie{
        fmt::format("has data_offsets {}, expected two integers that are not negative", offsets.dump())};
  }
  entry.begin = offsets[0].get<uint64_t>();
  entry.end = offsets[1].get<uint64_t>();
  if (entry.begin > entry.end)
    throw Lie{fmt::format("has data_offsets that run backwards: {}", offsets.dump())};

  int64_t count = 0, bytes = 0;
  if (!product(entry.view.shape, &count) || __builtin_mul_overflow(count, size_of(*parsed), &bytes)) {
    throw Lie{fmt::format("has shape {}, which overflows", shape.dump())};
  }
  entry.view.nbytes = static_cast<uint64_t>(bytes);
  if (entry.end - entry.begin != entry.view.nbytes) {
    throw Lie{fmt::format("has data_offsets {} ({} bytes), but shape {} of {} needs {}", offsets.dump(),
                          entry.end - entry.begin, shape.dump(), titanium::name(*parsed), entry.view.nbytes)};
  }
  return entry;
}

}  // namespace

int64_t TensorSpec::count() const {
  for (const int64_t size : shape) {
    if (size < 0) throw BadCheckpoint("tensor '{}' has a negative size in its shape: {}", name, size);
  }
  int64_t count = 0;
  if (!product(shape, &count)) throw BadCheckpoint("tensor '{}' has a shape that overflows", name);
  return count;
}

uint64_t TensorSpec::nbytes() const {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(count(), size_of(dtype), &bytes)) {
    throw BadCheckpoint("tensor '{}' has a shape that overflows", name);
  }
  return static_cast<uint64_t>(bytes);
}

int64_t TensorView::count() const {
  return static_cast<int64_t>(nbytes) / size_of(dtype);
}

TensorView TensorView::rows(int64_t begin, int64_t end) const {
  if (shape.empty() || begin < 0 || begin > end || end > shape[0]) {
    throw BadCheckpoint("tensor '{}': rows {} to {} of {}", name, begin, end, shape.empty() ? 0 : shape[0]);
  }
  TensorView slice = *this;
  const uint64_t row_bytes = shape[0] == 0 ? 0 : nbytes / static_cast<uint64_t>(shape[0]);
  slice.shape[0] = end - begin;
  slice.data = data + static_cast<uint64_t>(begin) * row_bytes;
  slice.nbytes = static_cast<uint64_t>(end - begin) * row_bytes;
  return slice;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : source_(path.string()), file_(std::make_shared<const MappedFile>(path)) {
  parse(file_->bytes());
}

SafetensorsFile SafetensorsFile::from_bytes(std::span<const std::byte> bytes, const std::string& source) {
  SafetensorsFile file;
  file.source_ = source;
  file.parse(bytes);
  return file;
}

void SafetensorsFile::parse(std::span<const std::byte> bytes) {
  if (bytes.size() < 8) {
    throw BadCheckpoint(
        "{}: {} bytes, too short for a safetensors file (8 bytes of header length come first)", source_,
        bytes.size());
  }
  const uint64_t header_size = read_u64(bytes.data());
  if (header_size > bytes.size() - 8) {
    throw BadCheckpoint(
        "{}: the header length says {} bytes, but the file has {} after it (truncated, or not a "
        "safetensors file)",
        source_, header_size, bytes.size() - 8);
  }
  if (header_size > kMaxHeader) {
    throw BadCheckpoint("{}: the header length says {} bytes, allowed are {}", source_, header_size,
                        kMaxHeader);
  }
  const std::string_view text(reinterpret_cast<const char*>(bytes.data() + 8), header_size);
  if (text.empty() || text[0] != '{') {
    throw BadCheckpoint("{}: the header is not a JSON object (it must begin with '{{')", source_);
  }
  Json header;
  std::string why;
  if (!try_parse_json(text, {kMaxHeader, 8}, &header, &why)) {
    throw BadCheckpoint("{}: the header is not valid JSON: {}", source_, why);
  }

  std::vector<Entry> entries;
  entries.reserve(header.size());
  for (const auto& item : header.items()) {
    if (item.key() == "__metadata__") {
      if (!item.value().is_object()) throw BadCheckpoint("{}: __metadata__ is not an object", source_);
      for (const auto& pair : item.value().items()) {
        if (!pair.value().is_string()) {
          throw BadCheckpoint("{}: __metadata__ key '{}' is not a string", source_, pair.key());
        }
        metadata_[pair.key()] = pair.value().get<std::string>();
      }
      continue;
    }
    try {
      entries.push_back(read_entry(item.key(), item.value()));
    } catch (const Lie& lie) {
      throw BadCheckpoint("{}: tensor '{}' {}", source_, item.key(), lie.reason);
    }
  }

  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.view.name) < std::tie(b.begin, b.end, b.view.name);
  });
  const std::span<const std::byte> data = bytes.subspan(8 + header_size);
  uint64_t covered = 0;
  for (Entry& entry : entries) {
    if (entry.begin != covered) {
      throw BadCheckpoint(
          "{}: tensor '{}' begins at byte {} of the data, expected {}: {}", source_, entry.view.name,
          entry.begin, covered,
          entry.begin < covered ? "it overlaps the tensor before it" : "there is a hole before it");
    }
    if (entry.end > data.size()) {
      throw BadCheckpoint("{}: tensor '{}' ends at byte {} of the data, but the file has only {} (truncated)",
                          source_, entry.view.name, entry.end, data.size());
    }
    entry.view.data = data.data() + entry.begin;
    covered = entry.end;
  }
  if (covered != data.size()) {
    throw BadCheckpoint("{}: {} bytes after the last tensor belong to none", source_, data.size() - covered);
  }

  tensors_.reserve(entries.size());
  for (Entry& entry : entries) {
    index_.emplace(entry.view.name, tensors_.size());
    tensors_.push_back(std::move(entry.view));
  }
}

const TensorView* SafetensorsFile::find(std::string_view name) const {
  const auto at = index_.find(std::string(name));
  return at == index_.end() ? nullptr : &tensors_[at->second];
}

const TensorView& SafetensorsFile::at(std::string_view name) const {
  const TensorView* view = find(name);
  if (view == nullptr) throw BadCheckpoint("{}: has no tensor '{}'", source_, name);
  return *view;
}

}  // namespace titanium
