#include "titanium/serve/wire.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

namespace titanium {
namespace {

constexpr std::string_view kMagic = "titanium";
constexpr JsonLimits kBodyLimits{.max_bytes = uint64_t{1} << 28, .max_depth = 32};

template <typename T>
void put(std::byte* at, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) at[i] = static_cast<std::byte>(value >> (8 * i) & 0xff);
}

template <typename T>
T get(const std::byte* at) {
  T value = 0;
  for (size_t i = sizeof(T); i-- > 0;) value = static_cast<T>(value << 8) | static_cast<T>(at[i]);
  return value;
}

std::string valid_utf8(std::string_view text) {
  const std::string quoted = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json::parse(quoted).get<std::string>();
}

int64_t parse_id(const std::string& text) {
  int64_t id = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), id);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw BadData("message: id '{}' is not an integer", text);
  }
  return id;
}

Json parse_body(const std::string& text, const char* what) {
  Json body;
  std::string why;
  if (!try_parse_json(text, kBodyLimits, &body, &why))
    throw BadData("message: '{}' is not valid JSON: {}", what, why);
  if (!body.is_object())
    throw BadData("message: '{}' is a JSON {}, expected an object", what, body.type_name());
  return body;
}

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

std::array<std::byte, kFrameBytes> encode_frame(const Frame& frame) {
  std::array<std::byte, kFrameBytes> bytes;
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  put<uint32_t>(&bytes[8], kWireVersion);
  put<uint32_t>(&bytes[12], frame.fds);
  put<uint64_t>(&bytes[16], frame.bytes);
  return bytes;
}

Frame decode_frame(std::span<const std::byte, kFrameBytes> bytes) {
  if (std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    throw BadData("message: does not begin with 'titanium': the other side does not speak this protocol");
  }
  const auto version = get<uint32_t>(&bytes[8]);
  if (version != kWireVersion) {
    throw BadData("message: protocol version {}, this server speaks version {}", version, kWireVersion);
  }
  const Frame frame{get<uint32_t>(&bytes[12]), get<uint64_t>(&bytes[16])};
  if (frame.fds > 1) throw BadData("message: {} descriptors, allowed are 0 and 1", frame.fds);
  if (frame.bytes > kMaxBlob) throw BadData("message: {} bytes, allowed are {}", frame.bytes, kMaxBlob);
  return frame;
}

Message Message::call(std::string method, int64_t id) {
  Message message;
  message.name = std::move(method);
  message.id = id;
  return message;
}

Message Message::reply_to(const Message& call) {
  Message message;
  message.type = Type::kReply;
  message.name = call.name;
  message.id = call.id;
  return message;
}

Message Message::error_to(int64_t id, std::string_view kind, std::string_view text) {
  Message message;
  message.type = Type::kError;
  message.name = kind;
  message.text = text;
  message.id = id;
  return message;
}

const TensorView* Message::find(std::string_view tensor) const {
  for (const TensorView& view : tensors) {
    if (view.name == tensor) return &view;
  }
  return nullptr;
}

const TensorView& Message::at(std::string_view tensor) const {
  if (const TensorView* view = find(tensor)) return *view;
  throw BadData("{}: tensor '{}' is missing", name, tensor);
}

void Message::add(std::string tensor, Dtype dtype, std::vector<int64_t> shape,
                  std::span<const std::byte> bytes) {
  auto copy = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
  tensors.push_back({std::move(tensor), dtype, std::move(shape), copy->data(), copy->size()});
  owners.push_back(std::move(copy));
}

void Message::add(std::string tensor, const std::vector<double>& values) {
  add(std::move(tensor), Dtype::F64, {static_cast<int64_t>(values.size())}, bytes_of(values));
}

void Message::add(std::string tensor, const std::vector<int64_t>& values) {
  add(std::move(tensor), Dtype::I64, {static_cast<int64_t>(values.size())}, bytes_of(values));
}

std::string encode_header(Message& message) {
  std::stable_sort(
      message.tensors.begin(), message.tensors.end(),
      [](const TensorView& a, const TensorView& b) { return size_of(a.dtype) > size_of(b.dtype); });
  std::vector<TensorSpec> specs;
  specs.reserve(message.tensors.size());
  for (const TensorView& view : message.tensors) {
    specs.push_back({view.name, view.dtype, view.shape});
    if (specs.back().nbytes() != view.nbytes) {
      throw Bug("message: tensor '{}' has {} bytes, its shape needs {}", view.name, view.nbytes,
                specs.back().nbytes());
    }
  }
  Metadata metadata = {{"id", std::to_string(message.id)}};
  const auto body = [&] { return message.body.dump(-1, ' ', false, Json::error_handler_t::replace); };
  switch (message.type) {
    case Message::Type::kCall:
      metadata["method"] = message.name;
      metadata["args"] = body();
      break;
    case Message::Type::kReply:
      metadata["reply"] = message.name;
      metadata["result"] = body();
      break;
    case Message::Type::kError:
      metadata["error"] = message.name;
      metadata["message"] = valid_utf8(message.text);
      break;
  }
  return safetensors_header(specs, metadata);
}

Message decode_message(std::span<const std::byte> bytes, std::shared_ptr<const void> owner) {
  Message message;
  Metadata metadata;
  try {
    const SafetensorsFile file = SafetensorsFile::from_bytes(bytes, "message");
    metadata = file.metadata();
    message.tensors = file.tensors();
  } catch (const BadCheckpoint& error) {
    throw BadData("{}", error.what());
  }
  message.owners.push_back(std::move(owner));

  const auto take = [&](const char* key) {
    const auto at = metadata.find(key);
    if (at == metadata.end()) throw BadData("message: __metadata__ has no '{}'", key);
    std::string value = std::move(at->second);
    metadata.erase(at);
    return value;
  };
  if (metadata.contains("method") + metadata.contains("reply") + metadata.contains("error") != 1) {
    throw BadData("message: __metadata__ must have exactly one of 'method', 'reply', 'error'");
  }
  message.id = parse_id(take("id"));
  if (metadata.contains("method")) {
    message.name = take("method");
    message.body = parse_body(take("args"), "args");
  } else if (metadata.contains("reply")) {
    message.type = Message::Type::kReply;
    message.name = take("reply");
    message.body = parse_body(take("result"), "result");
  } else {
    message.type = Message::Type::kError;
    message.name = take("error");
    message.text = take("message");
  }
  if (!metadata.empty())
    throw BadData("message: __metadata__ has an unknown key '{}'", metadata.begin()->first);
  return message;
}

Json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

double as_number(const Json& json, std::string_view what) {
  if (json.is_number()) return json.get<double>();
  if (json == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (json == "inf") return std::numeric_limits<double>::infinity();
  if (json == "-inf") return -std::numeric_limits<double>::infinity();
  throw BadData("{}: {} is not a number (\"nan\", \"inf\" and \"-inf\" are)", what,
                json.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace titanium
