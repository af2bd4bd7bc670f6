#include "titanium/formats/gguf.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <type_traits>

#include "titanium/base/error.h"
#include "titanium/formats/gguf_types.h"
#include "titanium/formats/mapped_file.h"

namespace titanium {
namespace {

constexpr uint64_t kMaxName = 65535;                  // bytes of a key or tensor name
constexpr uint32_t kMaxDims = 4;                      // the format's own limit
constexpr uint64_t kMaxElements = uint64_t{1} << 23;  // array elements of one file, all arrays together
constexpr int kMaxNesting = 4;                        // arrays of arrays

// Value types, numbered as in the file.
enum : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kString, kArray, kU64, kI64, kF64 };

// Thrown as text and given the file's name by parse().
struct Lie {
  std::string reason;
};

// Bytes that a value of a type takes at least; empty for a type that does not exist.
std::optional<uint64_t> least_size(uint32_t type) {
  switch (type) {
    case kU8:
    case kI8:
    case kBool:
      return 1;
    case kU16:
    case kI16:
      return 2;
    case kU32:
    case kI32:
    case kF32:
      return 4;
    case kString:
    case kU64:
    case kI64:
    case kF64:
      return 8;
    case kArray:
      return 12;
    default:
      return std::nullopt;
  }
}

class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) : bytes_(bytes) {}

  uint64_t position() const { return at_; }
  uint64_t left() const { return bytes_.size() - at_; }

  template <typename T>
  T take(const char* what) {
    T value;
    std::memcpy(&value, take_bytes(sizeof value, what), sizeof value);
    return value;
  }

  std::string_view take_string(const char* what, uint64_t limit) {
    const auto size = take<uint64_t>(what);
    if (size > limit) throw Lie{fmt::format("{} of {} bytes, allowed are {}", what, size, limit)};
    return {reinterpret_cast<const char*>(take_bytes(size, what)), size};
  }

  GgufValue take_value(uint32_t type, int nesting) {
    switch (type) {
      case kU8:
        return {uint64_t{take<uint8_t>("value")}};
      case kU16:
        return {uint64_t{take<uint16_t>("value")}};
      case kU32:
        return {uint64_t{take<uint32_t>("value")}};
      case kU64:
        return {take<uint64_t>("value")};
      case kI8:
        return {int64_t{take<int8_t>("value")}};
      case kI16:
        return {int64_t{take<int16_t>("value")}};
      case kI32:
        return {int64_t{take<int32_t>("value")}};
      case kI64:
        return {take<int64_t>("value")};
      case kF32:
        return {take<float>("value")};
      case kF64:
        return {take<double>("value")};
      case kString:
        return {take_string("string", std::numeric_limits<uint64_t>::max())};
      case kArray:
        return take_array(nesting);
      case kBool: {
        const auto byte = take<uint8_t>("value");
        if (byte > 1) throw Lie{fmt::format("a boolean that is {}, expected 0 or 1", byte)};
        return {byte == 1};
      }
      default:
        throw Lie{fmt::format("value type {} does not exist (allowed: 0 to 12)", type)};
    }
  }

 private:
  const std::byte* take_bytes(uint64_t count, const char* what) {
    if (count > left()) {
      throw Lie{fmt::format("{} of {} bytes at byte {}, but the file ends after {} (truncated)", what, count,
                            at_, bytes_.size())};
    }
    const std::byte* here = bytes_.data() + at_;
    at_ += count;
    return here;
  }

  GgufValue take_array(int nesting) {
    if (nesting >= kMaxNesting) throw Lie{fmt::format("arrays nested deeper than {} levels", kMaxNesting)};
    const auto type = take<uint32_t>("array type");
    const auto count = take<uint64_t>("array length");
    const auto least = least_size(type);
    if (!least) throw Lie{fmt::format("array of value type {}, which does not exist", type)};
    if (count > left() / *least) {
      throw Lie{fmt::format("array of {} elements, more than the {} bytes left can hold (truncated)", count,
                            left())};
    }
    if (count > kMaxElements - elements_) {
      throw Lie{fmt::format("arrays of more than {} elements together", kMaxElements)};
    }
    elements_ += count;
    GgufValue::Array array;
    array.reserve(count);
    for (uint64_t i = 0; i < count; ++i) array.push_back(take_value(type, nesting + 1));
    return {std::move(array)};
  }

  std::span<const std::byte> bytes_;
  uint64_t at_ = 0;
  uint64_t elements_ = 0;
};

GgufTensor take_tensor_info(Cursor& cursor, uint64_t* offset) {
  GgufTensor tensor;
  tensor.name = cursor.take_string("tensor name", kMaxName);
  const auto dims = cursor.take<uint32_t>("number of dimensions");
  if (dims > kMaxDims) {
    throw Lie{fmt::format("tensor '{}' has {} dimensions, allowed are {}", tensor.name, dims, kMaxDims)};
  }
  int64_t count = 1;
  for (uint32_t i = 0; i < dims; ++i) {
    const auto size = cursor.take<uint64_t>("dimension");
    if (size == 0 || size > uint64_t{std::numeric_limits<int64_t>::max()} ||
        __builtin_mul_overflow(count, static_cast<int64_t>(size), &count)) {
      throw Lie{
          fmt::format("tensor '{}' has dimension {} of size {}: zero, or too large", tensor.name, i, size)};
    }
    tensor.shape.push_back(static_cast<int64_t>(size));
  }
  std::reverse(tensor.shape.begin(), tensor.shape.end());

  const auto type = cursor.take<uint32_t>("tensor type");
  const auto layout = block_layout(type);
  if (!layout) {
    throw Lie{fmt::format("tensor '{}' has type {} (allowed: F32, F16, BF16, Q8_0, Q4_0, Q4_1)", tensor.name,
                          ggml_type_name(type))};
  }
  tensor.type = static_cast<GgmlType>(type);
  if (tensor.columns() % layout->elements != 0) {
    throw Lie{fmt::format("tensor '{}' of type {} has rows of {} elements, not a multiple of {}", tensor.name,
                          name(tensor.type), tensor.columns(), layout->elements)};
  }
  int64_t bytes = 0;
  if (__builtin_mul_overflow(count / layout->elements, layout->bytes, &bytes)) {
    throw Lie{fmt::format("tensor '{}' has a size that overflows", tensor.name)};
  }
  tensor.nbytes = static_cast<uint64_t>(bytes);
  *offset = cursor.take<uint64_t>("tensor offset");
  return tensor;
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path)
    : source_(path.string()), file_(std::make_shared<const MappedFile>(path)) {
  parse(file_->bytes());
}

GgufFile GgufFile::from_bytes(std::span<const std::byte> bytes, const std::string& source) {
  GgufFile file;
  file.source_ = source;
  file.parse(bytes);
  return file;
}

void GgufFile::parse(std::span<const std::byte> bytes) try {
  Cursor cursor(bytes);
  if (bytes.size() < 4 || std::memcmp(bytes.data(), "GGUF", 4) != 0) {
    throw Lie{"is not a GGUF file (it must begin with the letters GGUF)"};
  }
  cursor.take<uint32_t>("magic");
  version_ = cursor.take<uint32_t>("version");
  if (version_ != 2 && version_ != 3) {
    const bool swapped = __builtin_bswap32(version_) == 2 || __builtin_bswap32(version_) == 3;
    throw Lie{fmt::format("has GGUF version {} (allowed: 2 and 3{})", version_,
                          swapped ? "; this one is big endian" : "")};
  }
  const auto tensor_count = cursor.take<uint64_t>("number of tensors");
  const auto key_count = cursor.take<uint64_t>("number of keys");
  if (key_count > cursor.left() / 13) {  // a key takes 8 bytes of length, 4 of type and 1 of value at least
    throw Lie{fmt::format("has {} keys, more than its {} bytes can hold", key_count, bytes.size())};
  }
  for (uint64_t i = 0; i < key_count; ++i) {
    const std::string key(cursor.take_string("key", kMaxName));
    try {
      if (metadata_.count(key)) throw Lie{"is given twice"};
      const auto type = cursor.take<uint32_t>("value type");
      metadata_.emplace(key, cursor.take_value(type, 0));
    } catch (const Lie& lie) {
      throw Lie{fmt::format("key '{}': {}", key, lie.reason)};
    }
  }

  if (tensor_count > cursor.left() / 24) {  // name length 8, dimensions 4, type 4, offset 8
    throw Lie{fmt::format("has {} tensors, more than its {} bytes can hold", tensor_count, bytes.size())};
  }
  std::vector<uint64_t> offsets(tensor_count);
  tensors_.reserve(tensor_count);
  for (uint64_t i = 0; i < tensor_count; ++i) {
    tensors_.push_back(take_tensor_info(cursor, &offsets[i]));
    if (!index_.emplace(tensors_.back().name, i).second) {
      throw Lie{fmt::format("tensor '{}' is listed twice", tensors_.back().name)};
    }
  }

  const int64_t alignment = integer("general.alignment").value_or(32);
  if (alignment <= 0 || alignment > (1 << 24) || (alignment & (alignment - 1)) != 0) {
    throw Lie{fmt::format("key 'general.alignment' is {}, expected a power of two up to 2^24", alignment)};
  }
  const auto step = static_cast<uint64_t>(alignment);
  const uint64_t start = (cursor.position() + step - 1) / step * step;
  const uint64_t room = bytes.size() > start ? bytes.size() - start : 0;
  std::vector<size_t> order(tensor_count);
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
    if (offsets[i] % step != 0) {
      throw Lie{fmt::format("tensor '{}' has offset {}, not a multiple of the alignment {}", tensors_[i].name,
                            offsets[i], step)};
    }
    if (offsets[i] > room || tensors_[i].nbytes > room - offsets[i]) {
      throw Lie{fmt::format("tensor '{}' takes {} bytes from {} on, but the data has only {} (truncated)",
                            tensors_[i].name, tensors_[i].nbytes, offsets[i], room)};
    }
    tensors_[i].data = bytes.data() + start + offsets[i];
  }
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return offsets[a] < offsets[b]; });
  for (size_t i = 1; i < order.size(); ++i) {
    const size_t a = order[i - 1], b = order[i];
    if (offsets[a] + tensors_[a].nbytes > offsets[b]) {
      throw Lie{fmt::format("tensors '{}' and '{}' overlap", tensors_[a].name, tensors_[b].name)};
    }
  }
} catch (const Lie& lie) {
  throw BadCheckpoint("{}: {}", source_, lie.reason);
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : &tensors_[at->second];
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto at = metadata_.find(key);
  return at == metadata_.end() ? nullptr : &at->second;
}

namespace {

// Each of these is empty when the value has another type or does not fit.
std::optional<int64_t> as_integer(const GgufValue& value) {
  if (const auto* i = std::get_if<int64_t>(&value.data)) return *i;
  if (const auto* u = std::get_if<uint64_t>(&value.data)) {
    if (*u <= uint64_t{std::numeric_limits<int64_t>::max()}) return static_cast<int64_t>(*u);
  }
  return std::nullopt;
}

std::optional<double> as_number(const GgufValue& value) {
  if (const auto* d = std::get_if<double>(&value.data)) return *d;
  if (const auto* f = std::get_if<float>(&value.data)) {
    char text[64];
    const auto end = std::to_chars(text, text + sizeof text, *f).ptr;
    double number = 0;
    std::from_chars(text, end, number);
    return number;
  }
  if (const auto i = as_integer(value)) return static_cast<double>(*i);
  return std::nullopt;
}

template <typename T>
std::optional<T> as(const GgufValue& value) {
  if (const auto* held = std::get_if<T>(&value.data)) return *held;
  return std::nullopt;
}

template <typename T>
std::optional<std::vector<T>> as_list(const GgufValue& value, std::optional<T> (*element)(const GgufValue&)) {
  const auto* array = std::get_if<GgufValue::Array>(&value.data);
  if (array == nullptr) return std::nullopt;
  std::vector<T> list;
  list.reserve(array->size());
  for (const GgufValue& item : *array) {
    auto converted = element(item);
    if (!converted) return std::nullopt;
    list.push_back(*converted);
  }
  return list;
}

// Absent stays absent; present but not what was asked for is an error.
template <typename F>
auto get(const std::string& source, std::string_view key, const GgufValue* value, const char* kind, F read)
    -> decltype(read(*value)) {
  if (value == nullptr) return std::nullopt;
  auto result = read(*value);
  if (!result) throw BadCheckpoint("{}: key '{}' is not {}", source, key, kind);
  return result;
}

}  // namespace

std::optional<int64_t> GgufFile::integer(std::string_view key) const {
  return get(source_, key, find(key), "an integer below 2^63", as_integer);
}

std::optional<double> GgufFile::number(std::string_view key) const {
  return get(source_, key, find(key), "a number", as_number);
}

std::optional<bool> GgufFile::boolean(std::string_view key) const {
  return get(source_, key, find(key), "a boolean", as<bool>);
}

std::optional<std::string_view> GgufFile::string(std::string_view key) const {
  return get(source_, key, find(key), "a string", as<std::string_view>);
}

std::optional<std::vector<std::string_view>> GgufFile::strings(std::string_view key) const {
  return get(source_, key, find(key), "a list of strings",
             [](const GgufValue& v) { return as_list<std::string_view>(v, as<std::string_view>); });
}

std::optional<std::vector<int64_t>> GgufFile::integers(std::string_view key) const {
  return get(source_, key, find(key), "a list of integers",
             [](const GgufValue& v) { return as_list<int64_t>(v, as_integer); });
}

}  // namespace titanium
