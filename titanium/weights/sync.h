// The weights of a store as a stream of full tensors under their Hugging Face names, for a rollout engine.
//
// Order: that of the weight table (embedding, blocks from first to last, final norm, head), the same for
// every layout.  A tied head, where it is asked for, comes last: where an untied model has its own.
//
// Memory: tensors lie in buckets.  While the consumer works on one, a thread fills the next: two are alive at
// most, and one tensor that is larger than a bucket.  There is no copy of the model.  Where this process has
// a weight as it shall be sent (the masters' own dtype, or the cast that the optimizer left for the next
// forward), a TensorStream gives a view of that and makes no bucket of it.
//
// On many ranks every one gets the whole stream, bitwise the same: all of them, those of other dp_replicate
// copies too, open it with the same options (`threads` is each rank's own), and step through it alike, one
// stream at a time.  What one rank refuses all refuse, with its rank and the option.  A bucket is gathered in
// rounds that take a quarter of one (64 KB at least, 8 MB at most) beside it.  A rank that closes its stream
// early waits until the others come to the next bucket, where they get a BadConfig that says so; where they
// do not come within the world's timeout, RankLost.
//
// While a stream is open the masters must stand still: whoever writes them (optimizer, load, init) gets a
// BadConfig from ParamStore and has changed nothing.  A stream is open until next() has given nothing, or
// until it is destroyed.  An async save may go on beside it, for it only reads.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "titanium/formats/safetensors.h"
#include "titanium/shard/param_store.h"

namespace titanium {

struct SyncOptions {
  std::optional<Dtype> dtype = Dtype::BF16;  // on the wire (round to nearest even); empty: as the masters are
  std::vector<std::string> keep_fp32 = {};   // names that are sent as F32 whatever `dtype` says
  bool tied_head = false;  // a tied embedding comes again as "lm_head.weight"; nothing for an untied model
  uint64_t bucket_bytes = uint64_t{64} << 20;
  // Of the weights; receivers take growing ones only.  Empty: one more than the last stream of this store
  // had.
  std::optional<int64_t> version = {};
  bool checksums = true;  // for streams that leave the process; without them receivers refuse the messages
  int threads = 0;        // that convert; 0: as many as ATen computes with
};

struct StreamHeader {
  int64_t version = 0;
  std::vector<TensorSpec> tensors;  // all that will come, in order
  uint64_t bytes = 0;               // of all tensors
  int64_t buckets = 0;              // of a BucketStream
};

struct BucketTensor {
  TensorSpec spec;
  uint64_t offset = 0;    // of its first byte in Bucket::bytes
  uint64_t checksum = 0;  // tree_hash of its bytes (hash.h); 0 without checksums
};

// Tensors end to end without gaps.  In `tensors` they are in the order of the stream; in `bytes` wide dtypes
// lie first, so that each is aligned.
struct Bucket {
  int64_t index = 0;  // from 0
  std::span<const std::byte> bytes;
  std::vector<BucketTensor> tensors;
};

// Whole buckets, for a socket (sync_wire.h makes messages of them).
class BucketStream {
 public:
  // BadConfig for a dtype that weights cannot have, for a name in keep_fp32 that the model lacks, and for a
  // bucket of 0 bytes; on all ranks where they differ.  The store outlives the stream.
  BucketStream(ParamStore& store, const SyncOptions& options);
  BucketStream(BucketStream&&) noexcept;
  BucketStream& operator=(BucketStream&&) noexcept;
  ~BucketStream();

  const StreamHeader& header() const;
  // What it gives is valid until the next call, the one that gives nothing included.
  std::optional<Bucket> next();
  // Over names, dtypes, shapes and checksums of all tensors (sync_wire.h: total_checksum); 0 without
  // checksums.  Bug before the end.
  uint64_t checksum() const;

 private:
  friend class TensorStream;
  struct State;
  explicit BucketStream(std::unique_ptr<State> state);  // that has not started yet
  std::unique_ptr<State> state_;
};

struct NamedTensor {
  std::string name;
  at::Tensor
      tensor;  // to read: a view of a bucket (valid until a later call of next() leaves it) or of the model
};

class TensorStream {
 public:
  TensorStream(ParamStore& store, const SyncOptions& options);  // errors: as BucketStream

  const StreamHeader& header() const { return buckets_.header(); }
  // Views stay valid until the next call at the earliest: copy what is kept longer.
  std::optional<NamedTensor> next();
  // The same stream by buckets, for who has not called next() yet (Bug otherwise).
  BucketStream into_buckets() &&;

 private:
  BucketStream buckets_;
  bool started_ = false;
  size_t position_ = 0;  // in the header's tensors
  std::optional<Bucket> bucket_;
  size_t at_ = 0;  // in the bucket's
};

TensorStream get_per_tensor_param(ParamStore& store, const SyncOptions& options = {});

}  // namespace titanium
