// The other end of a stream of weights (sync.h): messages in, a Hugging Face folder or tensors in memory
// brought up to date.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "titanium/weights/sync.h"

namespace titanium {

struct ReceiveOptions {
  // Tensors in memory alone: another floating dtype than the stream's is converted to; else it is refused.
  bool convert = false;
  bool fsync = true;  // a folder: return when it is on disk
};

struct ReceiveReport {
  int64_t version = 0;
  int64_t updated = 0;                   // tensors
  uint64_t bytes = 0;                    // of them, as they came
  std::vector<std::string> not_updated;  // of the target, sorted: the stream does not hold them
  std::vector<std::string> unknown;      // of the stream, in its order: the target does not have them
};

// Takes the messages of one stream after the other.  Before anything is written, "begin" checks that the
// version is newer than the target's and that shapes and dtypes are those of the target.  Each tensor's
// checksum is checked before it is applied, and the whole stream's at "end".
//
// Errors: BadData for a message or a stream that cannot be used (it names tensor, versions, checksums),
// BadCheckpoint for the folder.  After an error the stream is dropped, and a new one may begin.
class WeightReceiver {
 public:
  // A folder with weights.  New files are written aside, and put in place when the stream has ended well: by
  // one rename, whether there is one file or shards with an index (new shards get new names, so that the
  // rename of the index is the moment).  A broken stream, an error or a kill leaves the folder's weights as
  // they were. The version is kept in the files' metadata.  One receiver at a time for a folder.
  explicit WeightReceiver(const std::filesystem::path& folder, const ReceiveOptions& options = {});
  // Tensors, written in place, bucket by bucket: a stream that breaks leaves those updated that came before.
  explicit WeightReceiver(std::map<std::string, at::Tensor> tensors, const ReceiveOptions& options = {});
  WeightReceiver(WeightReceiver&&) noexcept;
  WeightReceiver& operator=(WeightReceiver&&) noexcept;
  ~WeightReceiver();

  // The report comes with the last message of a stream.
  std::optional<ReceiveReport> take(std::span<const std::byte> message);
  // Of a whole stream in this process.
  ReceiveReport take_all(BucketStream stream);

  std::optional<int64_t> version() const;  // of the last stream that ended well
  bool open() const;                       // between begin and end
  void drop();                             // an unfinished stream, if there is one

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace titanium
