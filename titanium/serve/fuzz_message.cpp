// Any bytes as a stream with messages on it: each is taken or refused, and what is taken can be read to the
// last byte and survives being sent again.
#include <algorithm>
#include <cstdint>

#include "titanium/serve/wire.h"

using namespace titanium;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    if (size > 0 && data[0] == 't') {  // a frame first; otherwise the blob alone
      if (bytes.size() < kFrameBytes) return 0;
      const Frame frame = decode_frame(bytes.first<kFrameBytes>());
      bytes = bytes.subspan(kFrameBytes);
      bytes = bytes.first(std::min<uint64_t>(bytes.size(), frame.bytes));
    }
    Message message = decode_message(bytes, nullptr);
    volatile unsigned sink = 0;
    for (const TensorView& view : message.tensors) {
      for (uint64_t i = 0; i < view.nbytes; ++i) sink = sink + static_cast<unsigned>(view.data[i]);
    }
    std::string again = encode_header(message);
    for (const TensorView& view : message.tensors) {
      again.append(reinterpret_cast<const char*>(view.data), view.nbytes);
    }
    const Message copy = decode_message(std::as_bytes(std::span(again)), nullptr);
    if (copy.id != message.id || copy.name != message.name || copy.body != message.body ||
        copy.tensors.size() != message.tensors.size()) {
      __builtin_trap();
    }
  } catch (const BadData&) {
  }
  return 0;
}
