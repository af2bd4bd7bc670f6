#include "titanium/weights/sync_wire.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/weights/hash.h"

namespace titanium {
namespace {

constexpr const char* kWhat = "message of a stream of weights";
constexpr const char* kBegin = "weights.begin";
constexpr const char* kBucket = "weights.bucket";
constexpr const char* kEnd = "weights.end";

Metadata metadata_of(const char* kind, const StreamHeader& header, int64_t index) {
  return {{"kind", kind}, {"version", std::to_string(header.version)}, {"index", std::to_string(index)}};
}

const std::string& text_of(const Metadata& metadata, const std::string& key) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) throw BadData("{}: __metadata__ has no '{}'", kWhat, key);
  return found->second;
}

int64_t number_of(const Metadata& metadata, const std::string& key) {
  const std::string& text = text_of(metadata, key);
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw BadData("{}: __metadata__ '{}' is '{}', not a number from 0 up", kWhat, key, text);
  }
  return value;
}

uint64_t hash_of(const std::string& text, const std::string& what) {
  uint64_t value = 0;
  if (!parse_hex(text, &value))
    throw BadData("{}: the checksum of {} is '{}', not 16 hex digits", kWhat, what, text);
  return value;
}

Json json_of(const Metadata& metadata, const std::string& key) {
  Json json;
  std::string why;
  if (!try_parse_json(text_of(metadata, key), {.max_depth = 8}, &json, &why))
    throw BadData("{}: __metadata__ '{}': {}", kWhat, key, why);
  return json;
}

TensorSpec spec_of(const Json& json) {
  const bool ok =
      json.is_array() && json.size() == 3 && json[0].is_string() && json[1].is_string() && json[2].is_array();
  const auto dtype = ok ? parse_dtype(json[1].get_ref<const std::string&>()) : std::nullopt;
  if (!dtype || !is_floating(*dtype)) {
    throw BadData("{}: a tensor is announced as {}, expected [name, F64 | F32 | F16 | BF16, [sizes]]", kWhat,
                  json.dump(-1, ' ', false, Json::error_handler_t::replace));
  }
  TensorSpec spec{json[0].get<std::string>(), *dtype, {}};
  for (const Json& size : json[2]) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{INT64_MAX})
      throw BadData("{}: tensor '{}' is announced with the size {}", kWhat, spec.name, size.dump());
    spec.shape.push_back(size.get<int64_t>());
  }
  return spec;
}

StreamHeader header_of(const Metadata& metadata) {
  StreamHeader header;
  header.buckets = number_of(metadata, "buckets");
  const Json tensors = json_of(metadata, "tensors");
  if (!tensors.is_array()) throw BadData("{}: __metadata__ 'tensors' is not a list", kWhat);
  std::set<std::string> names;
  for (const Json& tensor : tensors) {
    header.tensors.push_back(spec_of(tensor));
    const TensorSpec& spec = header.tensors.back();
    if (!names.insert(spec.name).second)
      throw BadData("{}: tensor '{}' is announced twice", kWhat, spec.name);
    if (__builtin_add_overflow(header.bytes, spec.nbytes(), &header.bytes))
      throw BadData("{}: the sizes of its tensors overflow", kWhat);
  }
  if (static_cast<uint64_t>(number_of(metadata, "bytes")) != header.bytes) {
    throw BadData("{}: __metadata__ 'bytes' is {}, its tensors have {}", kWhat, metadata.at("bytes"),
                  header.bytes);
  }
  return header;
}

StreamMessage decode(std::span<const std::byte> bytes) {
  const SafetensorsFile file = SafetensorsFile::from_bytes(bytes, kWhat);
  const Metadata& metadata = file.metadata();
  const std::string& kind = text_of(metadata, "kind");
  StreamMessage message;
  message.version = number_of(metadata, "version");
  message.index = number_of(metadata, "index");
  if (kind == kBucket) {
    message.kind = StreamMessage::Kind::kBucket;
    message.tensors = file.tensors();
    const Json checksums = json_of(metadata, "checksums");
    for (const TensorView& tensor : message.tensors) {
      const auto found = checksums.is_object() ? checksums.find(tensor.name) : checksums.end();
      if (found == checksums.end() || !found->is_string())
        throw BadData("{}: tensor '{}' has no checksum", kWhat, tensor.name);
      message.checksums[tensor.name] = hash_of(found->get<std::string>(), fmt::format("'{}'", tensor.name));
    }
    return message;
  }
  if (!file.tensors().empty()) throw BadData("{}: '{}' carries tensors", kWhat, kind);
  if (kind == kBegin) {
    message.header = header_of(metadata);
    message.header.version = message.version;
  } else if (kind == kEnd) {
    message.kind = StreamMessage::Kind::kEnd;
    message.checksum = hash_of(text_of(metadata, "checksum"), "the stream");
  } else {
    throw BadData("{}: kind '{}' is none of {}, {}, {}", kWhat, kind, kBegin, kBucket, kEnd);
  }
  return message;
}

}  // namespace

std::string begin_message(const StreamHeader& header) {
  Metadata metadata = metadata_of(kBegin, header, 0);
  Json tensors = Json::array();
  for (const TensorSpec& spec : header.tensors) tensors.push_back({spec.name, name(spec.dtype), spec.shape});
  metadata["tensors"] = tensors.dump();
  metadata["buckets"] = std::to_string(header.buckets);
  metadata["bytes"] = std::to_string(header.bytes);
  return safetensors_header({}, metadata);
}

std::string bucket_message_head(const StreamHeader& header, const Bucket& bucket) {
  Metadata metadata = metadata_of(kBucket, header, bucket.index + 1);
  Json checksums = Json::object();
  std::vector<const BucketTensor*> order;  // of their bytes; of two that begin together the empty one first
  for (const BucketTensor& tensor : bucket.tensors) {
    checksums[tensor.spec.name] = to_hex(tensor.checksum);
    order.push_back(&tensor);
  }
  std::stable_sort(order.begin(), order.end(), [](const BucketTensor* a, const BucketTensor* b) {
    return std::pair(a->offset, a->spec.nbytes()) < std::pair(b->offset, b->spec.nbytes());
  });
  std::vector<TensorSpec> specs;
  for (const BucketTensor* tensor : order) specs.push_back(tensor->spec);
  metadata["checksums"] = checksums.dump();
  return safetensors_header(specs, metadata);
}

std::string end_message(const StreamHeader& header, uint64_t checksum) {
  Metadata metadata = metadata_of(kEnd, header, header.buckets + 1);
  metadata["checksum"] = to_hex(checksum);
  return safetensors_header({}, metadata);
}

uint64_t total_checksum(std::span<const TensorSpec> tensors, std::span<const uint64_t> checksums) {
  if (tensors.size() != checksums.size())
    throw Bug("{} checksums for {} tensors", checksums.size(), tensors.size());
  Hash64 hash;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string line = fmt::format("{} {} [{}] {}\n", tensors[i].name, name(tensors[i].dtype),
                                         fmt::join(tensors[i].shape, ","), to_hex(checksums[i]));
    hash.add(std::as_bytes(std::span(line)));
  }
  return hash.value();
}

StreamMessage begin_of(const StreamHeader& header) {
  StreamMessage message;
  message.version = header.version;
  message.header = header;
  return message;
}

StreamMessage bucket_of(const StreamHeader& header, const Bucket& bucket) {
  StreamMessage message;
  message.kind = StreamMessage::Kind::kBucket;
  message.version = header.version;
  message.index = bucket.index + 1;
  for (const auto& [spec, offset, checksum] : bucket.tensors) {
    message.tensors.push_back(
        {spec.name, spec.dtype, spec.shape, bucket.bytes.data() + offset, spec.nbytes()});
    message.checksums[spec.name] = checksum;
  }
  return message;
}

StreamMessage end_of(const StreamHeader& header, uint64_t checksum) {
  StreamMessage message;
  message.kind = StreamMessage::Kind::kEnd;
  message.version = header.version;
  message.index = header.buckets + 1;
  message.checksum = checksum;
  return message;
}

StreamMessage decode_stream_message(std::span<const std::byte> bytes) {
  try {
    return decode(bytes);
  } catch (const BadCheckpoint& error) {  // what a file would be
    throw BadData("{}", error.what());
  }
}

}  // namespace titanium
