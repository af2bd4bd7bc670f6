// One save: what was there at the call, and the writing of it while training goes on.
#pragma once
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "titanium/formats/safetensors.h"
#include "titanium/optim/optimizer.h"
#include "titanium/shard/param_store.h"
#include "titanium/weights/checkpoint.h"
#include "titanium/weights/manifest.h"

namespace titanium {

// All ranks have one each, and run them together.  Every rank of the first dp_replicate copy writes files of
// its slices; rank 0 makes the folder, puts the manifest together from what the others say, and gives the
// name.
class SaveJob {
 public:
  // Notes which tensors there are; copies nothing.  `ranks` are all of the store's mesh, as a group of the
  // thread that runs the job.
  SaveJob(const ParamStore& store, const Optimizer* optimizer, int64_t step, Json train,
          const CheckpointOptions& options, Group ranks);
  ~SaveJob();

  // Writes the checkpoint and makes it the newest.  BadCheckpoint, the same on all ranks; RankLost, which
  // leaves a wreck for the next save.  Runs in any thread, once.  `refused`, where it is not empty, is why
  // this rank cannot take part: then the save fails on all.
  void run(const std::string& refused = "");

  // The unit will be written to: returns when its part of this save no longer reads it, after a copy or
  // (above CheckpointOptions::snapshot_bytes) after the disk.
  void before_write(const Unit& unit);

  bool finished() const { return finished_; }

 private:
  // A file of one state ("master", "exp_avg", ...), with the slices of every unit that has it.
  struct File {
    std::string state;
    SavedFile saved;
    std::vector<TensorSpec> specs;
    std::unique_ptr<SafetensorsWriter> writer;
  };
  struct Part {  // a unit's flat tensor for one file
    size_t file;
    at::Tensor live, copy;
    std::vector<Slice> slices;
  };
  struct UnitWork {
    const Unit* unit;
    std::vector<Part> parts;
    uint64_t bytes = 0;
    bool copied = false, written = false;
  };

  void add_part(UnitWork& work, const std::string& state, const at::Tensor& flat,
                const std::vector<Slice>& slices);
  void save(const std::string& refused);
  void write_files(const std::filesystem::path& partial, const std::atomic<bool>& lost);
  std::string for_rank_0() const;
  void finish(const std::filesystem::path& partial, const std::vector<std::string>& all);
  void add_files_of_others(const std::filesystem::path& partial, const std::vector<std::string>& all);
  void write_unit(UnitWork& work, const std::atomic<bool>& lost);
  // The hashes of its bytes.
  std::vector<uint64_t> write_slice(UnitWork& work, Part& part, const Slice& slice,
                                    const std::atomic<bool>& lost);
  void stage(const std::string& name) const;

  CheckpointOptions options_;
  Group ranks_;
  Manifest manifest_;  // of this rank's files, then on rank 0 of all
  std::vector<File> files_;
  std::vector<UnitWork> work_;
  std::map<const Unit*, size_t> index_;
  std::vector<std::byte> piece_;

  std::mutex mutex_;  // guards copies, the flags of UnitWork, snapshot_, and reading of live tensors
  std::condition_variable changed_;
  uint64_t snapshot_ = 0;  // bytes of the copies
  std::atomic<bool> finished_ = false;
};

}  // namespace titanium
