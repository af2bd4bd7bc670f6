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

class SaveJob {
 public:
  // Notes which tensors there are; copies nothing.
  SaveJob(const ParamStore& store, const Optimizer* optimizer, int64_t step, Json train,
          const CheckpointOptions& options);
  ~SaveJob();

  // Writes the checkpoint and makes it the newest.  BadCheckpoint.  Runs in any thread, once.
  void run();

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
  void write_files(const std::filesystem::path& partial);
  void write_unit(UnitWork& work);
  uint64_t write_slice(UnitWork& work, Part& part, const Slice& slice);  // the hash of its bytes
  void stage(const std::string& name) const;

  CheckpointOptions options_;
  Manifest manifest_;
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
