// A stream of weights as messages.  Each is a safetensors blob whose __metadata__ says what it is; a Python
// twin is python/titanium/receiver.py.
//
//   weights.begin   {kind, version, index 0, buckets, bytes, tensors: JSON [[name, dtype, [shape]], ...]}
//   weights.bucket  {kind, version, index, checksums: JSON {name: 16 hex digits}} and the tensors
//   weights.end     {kind, version, index, checksum: 16 hex digits over the whole stream}
//
// index counts the messages of a stream: 0 begins, the buckets are 1 to n, n + 1 ends.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "titanium/weights/sync.h"

namespace titanium {

std::string begin_message(const StreamHeader& header);
// The bytes that come before bucket.bytes.
std::string bucket_message_head(const StreamHeader& header, const Bucket& bucket);
std::string end_message(const StreamHeader& header, uint64_t checksum);

// XXH64 of a line "<name> <dtype> [<sizes joined by comma>] <16 hex digits>\n" for each tensor, in order.
uint64_t total_checksum(std::span<const TensorSpec> tensors, std::span<const uint64_t> checksums);

struct StreamMessage {
  enum class Kind { kBegin, kBucket, kEnd } kind = Kind::kBegin;
  int64_t version = 0, index = 0;
  StreamHeader header;                        // begin
  std::vector<TensorView> tensors;            // bucket: views of the bytes that were decoded
  std::map<std::string, uint64_t> checksums;  // bucket
  uint64_t checksum = 0;                      // end
};

// `bytes` are any bytes.  BadData says what is wrong with them.
StreamMessage decode_stream_message(std::span<const std::byte> bytes);

// What decoding begin_message, a bucket's message and end_message would give, without the bytes between; the
// tensors are views of the bucket.
StreamMessage begin_of(const StreamHeader& header);
StreamMessage bucket_of(const StreamHeader& header, const Bucket& bucket);
StreamMessage end_of(const StreamHeader& header, uint64_t checksum);

}  // namespace titanium
