#include "titanium/weights/checkpoint_load.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "titanium/base/error.h"
#include "titanium/formats/mapped_file.h"
#include "titanium/formats/safetensors.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/manifest.h"
#include "titanium/weights/scalar_type.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

// The files of a checkpoint, each opened when it is first needed.
class Files {
 public:
  Files(const fs::path& folder, const Manifest& manifest)
      : folder_(folder), manifest_(manifest), open_(manifest.files.size()) {}

  const TensorView& tensor(const SavedSlice& slice) {
    const TensorView* view = open(slice.file).find(slice.weight);
    const int64_t count = slice.end - slice.begin;
    if (view == nullptr)
      throw BadCheckpoint("{}: has no tensor '{}', which the manifest puts there", path(slice.file),
                          slice.weight);
    if (view->dtype != slice.dtype || view->count() != count) {
      throw BadCheckpoint("{}: tensor '{}' is {} [{}], the manifest says {} elements of {}", path(slice.file),
                          slice.weight, name(view->dtype), fmt::join(view->shape, ", "), count,
                          name(slice.dtype));
    }
    return *view;
  }
  std::string path(size_t file) const { return (folder_ / manifest_.files[file].name).string(); }

 private:
  struct Open {
    explicit Open(const fs::path& path)
        : bytes(path), tensors(SafetensorsFile::from_bytes(bytes.bytes(), path.string())) {}
    MappedFile bytes;
    SafetensorsFile tensors;
  };

  const SafetensorsFile& open(size_t file) {
    if (!open_[file]) {
      open_[file] = std::make_unique<Open>(path(file));
      const std::span<const std::byte> bytes = open_[file]->bytes.bytes();
      uint64_t header = 0;  // its length, which the parser has checked
      std::memcpy(&header, bytes.data(), sizeof header);
      if (Hash64::of(bytes.first(8 + header)) != manifest_.files[file].header_hash) {
        throw BadCheckpoint("{}: the header is not the one that was saved (its checksum differs)",
                            path(file));
      }
    }
    return open_[file]->tensors;
  }

  fs::path folder_;
  const Manifest& manifest_;
  std::vector<std::unique_ptr<Open>> open_;
};

// What is saved, by (state, weight), in the order of elements.
using Saved = std::map<std::pair<std::string, std::string>, std::vector<const SavedSlice*>>;

Saved index_of(const Manifest& manifest, const fs::path& folder) {
  Saved saved;
  for (const SavedSlice& slice : manifest.slices) saved[{slice.state, slice.weight}].push_back(&slice);
  for (auto& [key, slices] : saved) {
    std::sort(slices.begin(), slices.end(),
              [](const SavedSlice* a, const SavedSlice* b) { return a->begin < b->begin; });
    for (size_t i = 1; i < slices.size(); ++i) {
      if (slices[i]->begin < slices[i - 1]->end) {
        throw BadCheckpoint("{}: '{}' of '{}' is saved twice from element {} on", folder.string(), key.first,
                            key.second, slices[i]->begin);
      }
    }
  }
  return saved;
}

// A run of bytes from a saved tensor to a tensor of ours.
struct Copy {
  const SavedSlice* saved;
  int64_t saved_offset;  // bytes
  Unit* unit;
  std::string state;
  int64_t offset;  // bytes in the unit's flat tensor
  int64_t bytes;
};

class Loader {
 public:
  Loader(const fs::path& folder, ParamStore& store, Optimizer* optimizer)
      : folder_(folder),
        store_(store),
        optimizer_(optimizer),
        manifest_(read_manifest(folder)),
        saved_(index_of(manifest_, folder)),
        files_(folder, manifest_) {}

  LoadedCheckpoint load() {
    check_optimizer();
    check_names();
    for (const Slice& slice : store_.slices()) {
      plan(slice, kMaster, to_dtype(slice.unit->dtypes().param));
      if (optimizer_ == nullptr) continue;
      for (const std::string& state : optimizer_->state_names()) {
        if (saved_.count({state, slice.weight->name()}))
          plan(slice, state, to_dtype(optimizer_->state_dtype(*slice.unit)));
      }
    }
    verify();
    write();
    return {manifest_.step, manifest_.train};
  }

 private:
  void check_optimizer() const {
    if (optimizer_ == nullptr) return;
    if (manifest_.optimizer.empty()) {
      throw BadCheckpoint("{}: holds no optimizer state; load the weights alone to start a new run",
                          folder_.string());
    }
    if (manifest_.optimizer != optimizer_->name()) {
      throw BadCheckpoint("{}: holds the state of the optimizer {}, this run has {} ([optimizer] name)",
                          folder_.string(), manifest_.optimizer, optimizer_->name());
    }
    const std::vector<std::string> known = optimizer_->state_names();
    for (const auto& [key, slices] : saved_) {
      if (key.first != kMaster && std::find(known.begin(), known.end(), key.first) == known.end()) {
        throw BadCheckpoint("{}: holds '{}' of '{}', which this run's {} does not keep (allowed: {})",
                            folder_.string(), key.first, key.second, optimizer_->name(),
                            fmt::join(known, ", "));
      }
    }
  }

  void check_names() const {
    for (const auto& [key, slices] : saved_) {
      if (store_.table().find(key.second) == nullptr) {
        throw BadCheckpoint(
            "{}: holds the weight '{}' ({}), which the model has not: was it saved of another model?",
            folder_.string(), key.second, files_.path(slices.front()->file));
      }
    }
  }

  // Adds the copies that fill a slice of ours; every element of it must be saved.
  void plan(const Slice& slice, const std::string& state, Dtype dtype) {
    const Weight& weight = *slice.weight;
    const auto found = saved_.find({state, weight.name()});
    if (found == saved_.end()) {
      throw BadCheckpoint("{}: has no '{}' of the weight '{}' of shape [{}]", folder_.string(), state,
                          weight.name(), fmt::join(weight.shape(), ", "));
    }
    int64_t at = slice.begin;
    for (const SavedSlice* saved : found->second) {
      check_slice(*saved, weight, dtype);
      const int64_t begin = std::max(at, saved->begin), end = std::min(slice.end, saved->end);
      if (begin >= end) continue;
      if (begin > at) break;
      files_.tensor(*saved);
      needed_.insert(saved);
      const int64_t width = size_of(dtype);
      copies_.push_back({saved, (begin - saved->begin) * width, slice.unit, state,
                         (slice.offset + begin - slice.begin) * width, (end - begin) * width});
      at = end;
    }
    if (at < slice.end) {
      throw BadCheckpoint("{}: '{}' of the weight '{}' is not whole: elements from {} on are missing",
                          folder_.string(), state, weight.name(), at);
    }
  }

  void check_slice(const SavedSlice& saved, const Weight& weight, Dtype dtype) const {
    if (saved.shape != weight.shape()) {
      throw BadCheckpoint("{}: '{}' of the weight '{}' has shape [{}], the model wants [{}]",
                          files_.path(saved.file), saved.state, weight.name(), fmt::join(saved.shape, ", "),
                          fmt::join(weight.shape(), ", "));
    }
    if (saved.dtype != dtype) {
      throw BadCheckpoint("{}: '{}' of the weight '{}' was saved as {}, this run keeps it as {} ({})",
                          files_.path(saved.file), saved.state, weight.name(), torch_name(saved.dtype),
                          torch_name(dtype),
                          saved.state == kMaster ? "[training] dtype" : "[optimizer] state_dtype");
    }
  }

  // The checksums of all that will be read.
  void verify() {
    const std::vector<const SavedSlice*> slices(needed_.begin(), needed_.end());
    std::vector<const TensorView*> views;
    for (const SavedSlice* slice : slices) views.push_back(&files_.tensor(*slice));
    std::vector<char> bad(slices.size(), 0);
    at::parallel_for(0, static_cast<int64_t>(slices.size()), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        bad[i] = Hash64::of({views[i]->data, views[i]->nbytes}) != slices[i]->hash;
    });
    for (size_t i = 0; i < slices.size(); ++i) {
      if (bad[i]) {
        throw BadCheckpoint("{}: '{}' of the weight '{}' is not what was saved (its checksum differs)",
                            files_.path(slices[i]->file), slices[i]->state, slices[i]->weight);
      }
    }
  }

  void write() {
    for (const auto& unit : store_.units()) store_.before_write(*unit);
    if (optimizer_ != nullptr) {
      for (const auto& unit : store_.units()) optimizer_->drop_state(*unit);
      optimizer_->set_updates(manifest_.updates);
    }
    struct Run {
      const std::byte* from;
      std::byte* to;
      int64_t bytes;
    };
    constexpr int64_t kRun = 1 << 20;
    std::vector<Run> runs;
    for (const Copy& copy : copies_) {
      const at::Tensor flat =
          copy.state == kMaster ? copy.unit->shard() : optimizer_->make_state(*copy.unit, copy.state);
      const std::byte* from = files_.tensor(*copy.saved).data + copy.saved_offset;
      std::byte* to = static_cast<std::byte*>(flat.data_ptr()) + copy.offset;
      for (int64_t at = 0; at < copy.bytes; at += kRun)
        runs.push_back({from + at, to + at, std::min(kRun, copy.bytes - at)});
    }
    at::parallel_for(0, static_cast<int64_t>(runs.size()), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i)
        std::memcpy(runs[i].to, runs[i].from, static_cast<size_t>(runs[i].bytes));
    });
    for (const auto& unit : store_.units()) unit->written();
  }

  const fs::path folder_;
  ParamStore& store_;
  Optimizer* optimizer_;
  const Manifest manifest_;
  const Saved saved_;
  Files files_;
  std::vector<Copy> copies_;
  std::set<const SavedSlice*> needed_;
};

}  // namespace

LoadedCheckpoint load_checkpoint(const fs::path& folder, ParamStore& store, Optimizer* optimizer) {
  return Loader(folder, store, optimizer).load();
}

}  // namespace titanium
