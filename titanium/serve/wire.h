// The messages of `titanium serve` as bytes; no sockets here, and no torch.
//
// A message is a frame of 24 bytes and a blob, which is a safetensors file: its __metadata__ says what the
// message is, its tensors are the payload.  The blob follows the frame on the stream, or lies in one memfd
// passed with it.
//   call    {"method": name, "id": n, "args": JSON}
//   reply   {"reply": name, "id": n, "result": JSON}
//   error   {"error": kind, "id": n, "message": text}
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/formats/safetensors.h"

namespace titanium {

// 8 bytes "titanium", then little endian: version (4), number of descriptors (4), bytes of the blob (8).
constexpr size_t kFrameBytes = 24;
constexpr uint32_t kWireVersion = 1;
constexpr uint64_t kMaxBlob = uint64_t{1} << 36;

struct Frame {
  uint32_t fds = 0;    // 0: the blob follows; 1: it is in the descriptor
  uint64_t bytes = 0;  // of the blob, up to kMaxBlob
};
std::array<std::byte, kFrameBytes> encode_frame(const Frame& frame);
Frame decode_frame(std::span<const std::byte, kFrameBytes> bytes);  // BadData: not a frame of this version

struct Message {
  enum class Type { kCall, kReply, kError };
  Type type = Type::kCall;
  int64_t id = 0;                   // a reply and an error carry that of their call
  std::string name;                 // method of a call or reply; kind of an error
  std::string text;                 // of an error
  Json body = Json::object();       // arguments or result
  std::vector<TensorView> tensors;  // views of bytes that `owners` keep alive
  std::vector<std::shared_ptr<const void>> owners;

  static Message call(std::string method, int64_t id);
  static Message reply_to(const Message& call);
  static Message error_to(int64_t id, std::string_view kind, std::string_view text);

  const TensorView* find(std::string_view tensor) const;  // nullptr when absent
  const TensorView& at(std::string_view tensor) const;    // BadData when absent
  // Copies `bytes`, which belong to a tensor of that dtype and shape.
  void add(std::string tensor, Dtype dtype, std::vector<int64_t> shape, std::span<const std::byte> bytes);
  void add(std::string tensor, const std::vector<double>& values);   // F64 [n]
  void add(std::string tensor, const std::vector<int64_t>& values);  // I64 [n]
};

// The header of the blob; after it come the bytes of message.tensors, which this sorts: wide dtypes first, so
// that every tensor is aligned.  Text that is not UTF-8 is mended.
std::string encode_header(Message& message);

// `bytes` are any bytes; `owner` keeps them alive.  BadData says what is wrong.
Message decode_message(std::span<const std::byte> bytes, std::shared_ptr<const void> owner);

// JSON has no infinities: a number that is not finite crosses as "nan", "inf" or "-inf".
Json json_number(double value);
double as_number(const Json& json, std::string_view what);  // BadData names `what`

}  // namespace titanium
