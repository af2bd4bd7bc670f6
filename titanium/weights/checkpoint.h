// Saving and resuming a run.
//
// A checkpoint is a folder `step-<n>`: safetensors files of slices under their Hugging Face names, one file
// for the masters and one for each optimizer state; manifest.json (manifest.h); and COMPLETE, which holds the
// manifest's checksum.  It is written as `step-<n>.partial` and renamed when everything is on disk, so a kill
// or a power cut at any point leaves the older checkpoints.
//
// On many ranks each writes files of its own slices, into one folder that all share; of several dp_replicate
// copies the first writes.  All ranks make the same calls.  What fails on one fails on all, with one error; a
// rank that is lost gives RankLost, and leaves at most a folder that find_latest passes over.
#pragma once
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/formats/json.h"
#include "titanium/optim/optimizer.h"
#include "titanium/shard/param_store.h"

namespace titanium {

struct CheckpointOptions {
  std::filesystem::path folder = {};  // holds the step-<n> folders; made when missing
  int64_t keep_latest_k = 10;         // complete checkpoints to keep, the new one included; 0: all
  bool async = true;                  // save() returns at once and a thread writes
  // What copies of not yet written units may take while a save is pending; above it an update waits for the
  // disk.
  uint64_t snapshot_bytes = UINT64_MAX;
  // Called by the writing thread before each stage of a save: "files", "unit <name>", "close <file>"; then on
  // rank 0 "manifest", "complete", "rename", "prune".
  std::function<void(std::string_view stage)> on_stage = {};
};

struct CheckpointInfo {
  std::filesystem::path path;
  int64_t step = 0;
};

// The newest complete checkpoint of a folder, by step, whichever process wrote it; none when there is none or
// no folder.
struct LatestCheckpoint {
  std::optional<CheckpointInfo> found;
  std::vector<std::string> warnings;  // newer ones that were passed over, and why
  bool damaged = false;               // one of those is not what a kill leaves behind
};
LatestCheckpoint find_latest(const std::filesystem::path& folder);
// The same as the first rank of the group sees it, on all of them.
LatestCheckpoint find_latest(const std::filesystem::path& folder, const Group& ranks);

// All complete checkpoints of a folder, oldest first.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& folder);

// What a caller gets back from a load.
struct LoadedCheckpoint {
  int64_t step = 0;
  Json train;          // as given to save()
  uint64_t bytes = 0;  // of tensors that this rank has read; the rest is the same on all ranks
};

// One object for a run.  It installs itself as the store's write hook (design D13): save() copies nothing,
// and an update that comes before the writer copies the unit first, so that the files hold the values at the
// call.
class Checkpointer {
 public:
  // optimizer may be null: masters only.  Store and optimizer outlive this object.
  Checkpointer(ParamStore& store, Optimizer* optimizer, CheckpointOptions options);
  ~Checkpointer();  // waits for a pending save; an error that nobody asked for goes to stderr
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  // Saves masters, optimizer state and `train` (data position, seed, config: the caller's) as step-<step>.
  // Waits for a pending save first; when that one failed, this one is made all the same, and the older error
  // stays for take_error() or wait().  Older complete checkpoints above keep_latest_k, and what killed saves
  // left behind, go when the new one is complete.  BadCheckpoint with path and the system's reason, of this
  // save alone: where it is not async, or no thread can be made.
  void save(int64_t step, Json train);

  // Why a save failed that has ended by now, without waiting, once; null where none did.  Ranks do not learn
  // it at the same call: who acts on it must agree with the others first.
  std::exception_ptr take_error();

  // Until nothing is pending.  Throws the newest error that nobody has taken, once.
  void wait();
  bool pending() const;

  // Fills masters and optimizer state, for any layout of the saving ranks and of these.  A rank reads what it
  // owns, in whole checksummed pieces.  Waits for a pending save.
  // BadCheckpoint names file and tensor: incomplete, sizes or checksums that do not fit, a weight missing or
  // unexpected, other shapes, other dtypes (both named), another optimizer.  Everything is checked, by all
  // ranks, before the first byte is written.
  LoadedCheckpoint load(const std::filesystem::path& checkpoint);
  // Masters only, e.g. to start another run from it.
  LoadedCheckpoint load_masters(const std::filesystem::path& checkpoint);

 private:
  struct Pending;
  void run_now(const std::string& refused = "");
  void settle();  // waits for the pending save and keeps its error

  ParamStore& store_;
  Optimizer* optimizer_;
  CheckpointOptions options_;
  std::unique_ptr<Pending> pending_;
  std::exception_ptr error_;  // of the newest save that failed, until somebody takes it
};

}  // namespace titanium
