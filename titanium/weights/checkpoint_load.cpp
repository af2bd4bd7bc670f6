#include "titanium/weights/checkpoint_load.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "titanium/base/error.h"
#include "titanium/formats/mapped_file.h"
#include "titanium/formats/safetensors.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/manifest.h"
#include "titanium/weights/patience.h"
#include "titanium/weights/scalar_type.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPiece = 1 << 18;  // elements that a thread copies at a time

// The files of a checkpoint, each opened when it is first needed.
class Files {
 public:
  Files(const fs::path& folder, const Manifest& manifest)
      : folder_(folder), manifest_(manifest), open_(manifest.files.size()) {}

  const TensorView& tensor(const SavedSlice& slice) {
    const TensorView* view = open(slice.file).find(slice.weight);
    const int64_t count = slice.piece.count();
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

// What is saved, by (state, weight).
using Saved = std::map<std::pair<std::string, std::string>, std::vector<const SavedSlice*>>;

Saved index_of(const Manifest& manifest) {
  Saved saved;
  for (const SavedSlice& slice : manifest.slices) saved[{slice.state, slice.weight}].push_back(&slice);
  for (auto& [key, slices] : saved) {
    std::sort(slices.begin(), slices.end(), [](const SavedSlice* a, const SavedSlice* b) {
      return std::pair(a->piece.begin, a->piece.column_begin) <
             std::pair(b->piece.begin, b->piece.column_begin);
    });
  }
  return saved;
}

// What a slice of ours takes from a saved one.
struct Copy {
  const SavedSlice* saved;
  Slice slice;
  std::string state;
};

class Loader {
 public:
  Loader(const fs::path& folder, ParamStore& store, Optimizer* optimizer)
      : folder_(folder),
        store_(store),
        optimizer_(optimizer),
        manifest_(read_manifest(folder)),
        saved_(index_of(manifest_)),
        files_(folder, manifest_) {}

  // All that can be wrong; what passes here is written.
  void check(const std::atomic<bool>& lost) {
    store_.check_free();
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
    verify(lost);
  }

  LoadedCheckpoint write() {
    for (const auto& unit : store_.units()) store_.before_write(*unit);
    if (optimizer_ != nullptr) {
      for (const auto& unit : store_.units()) optimizer_->drop_state(*unit);
      make_states();
      optimizer_->set_updates(manifest_.updates);
    }
    std::vector<std::pair<Copy, at::Tensor>> parts;  // and where each goes
    for (const Copy& copy : copies_) {
      const Unit& unit = *copy.slice.unit;
      const at::Tensor flat = copy.state == kMaster ? unit.shard() : optimizer_->make_state(unit, copy.state);
      for (const Slice& part : parts_of(copy.slice, kPiece))
        parts.emplace_back(Copy{copy.saved, part, copy.state}, part.of(flat));
    }
    at::parallel_for(0, static_cast<int64_t>(parts.size()), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) take(parts[i].first, parts[i].second);
    });
    for (const auto& unit : store_.units()) unit->written();
    return {manifest_.step, manifest_.train, bytes_};
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

  // Adds the copies that fill a slice of ours; every element of it must be saved, and once.
  void plan(const Slice& slice, const std::string& state, Dtype dtype) {
    const Weight& weight = *slice.weight;
    const auto found = saved_.find({state, weight.name()});
    if (found == saved_.end()) {
      throw BadCheckpoint("{}: has no '{}' of the weight '{}' of shape [{}]", folder_.string(), state,
                          weight.name(), fmt::join(weight.shape(), ", "));
    }
    const Piece mine = piece_of(slice);
    struct Run {
      int64_t begin, end;  // of our slice
    };
    std::vector<Run> runs;
    for (const SavedSlice* saved : found->second) {
      check_slice(*saved, weight, dtype);
      const size_t before = runs.size();
      int64_t first = INT64_MAX, last = 0;  // of the saved elements that are taken
      each_overlap(mine, saved->piece, [&](int64_t at, int64_t from, int64_t count) {
        runs.push_back({at, at + count});
        first = std::min(first, from);
        last = std::max(last, from + count);
      });
      if (runs.size() == before) continue;
      files_.tensor(*saved);
      need(*saved, first * size_of(dtype), last * size_of(dtype));
      copies_.push_back({saved, slice, state});
    }
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.begin < b.begin; });
    int64_t at = 0;
    for (const Run& run : runs) {
      if (run.begin < at) {
        throw BadCheckpoint("{}: '{}' of '{}' is saved twice from element {} on", folder_.string(), state,
                            weight.name(), slice.global_index(run.begin));
      }
      if (run.begin > at) break;
      at = run.end;
    }
    if (at < slice.count()) {
      throw BadCheckpoint("{}: '{}' of the weight '{}' is not whole: elements from {} on are missing",
                          folder_.string(), state, weight.name(), slice.global_index(at));
    }
  }

  // The checksums of bytes [begin, end) of a saved slice will be compared.
  void need(const SavedSlice& saved, int64_t begin, int64_t end) {
    std::set<size_t>& hashes = needed_[&saved];
    for (uint64_t i = static_cast<uint64_t>(begin) / manifest_.hashed;
         i <= static_cast<uint64_t>(end - 1) / manifest_.hashed; ++i)
      hashes.insert(i);
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
  void verify(const std::atomic<bool>& lost) {
    struct Bytes {
      const SavedSlice* saved;
      std::span<const std::byte> bytes;
      uint64_t hash;
    };
    std::vector<Bytes> all;
    for (const auto& [saved, hashes] : needed_) {
      const TensorView& view = files_.tensor(*saved);
      for (const size_t i : hashes) {
        const uint64_t begin = i * manifest_.hashed;
        const uint64_t bytes = std::min(manifest_.hashed, view.nbytes - begin);
        all.push_back({saved, {view.data + begin, bytes}, saved->hashes[i]});
        bytes_ += bytes;
      }
    }
    std::vector<char> bad(all.size(), 0);
    at::parallel_for(0, static_cast<int64_t>(all.size()), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to && !lost; ++i) bad[i] = Hash64::of(all[i].bytes) != all[i].hash;
    });
    if (lost) throw RankLost("another rank is lost, so the load ends");
    for (size_t i = 0; i < all.size(); ++i) {
      if (bad[i]) {
        throw BadCheckpoint("{}: '{}' of the weight '{}' is not what was saved (its checksum differs)",
                            files_.path(all[i].saved->file), all[i].saved->state, all[i].saved->weight);
      }
    }
  }

  // A unit has state or not as a whole, on all ranks: also where this one owns nothing of the weight that
  // has.
  void make_states() {
    for (const auto& [key, slices] : saved_) {
      if (key.first == kMaster) continue;
      if (Unit* unit = store_.weight(key.second).unit_here()) optimizer_->make_state(*unit, key.first);
    }
  }

  void take(const Copy& copy, const at::Tensor& target) {
    const int64_t width = size_of(copy.saved->dtype);
    const std::byte* from = files_.tensor(*copy.saved).data;
    auto* to = static_cast<std::byte*>(target.data_ptr());
    each_overlap(piece_of(copy.slice), copy.saved->piece, [&](int64_t mine, int64_t saved, int64_t count) {
      std::memcpy(to + mine * width, from + saved * width, static_cast<size_t>(count * width));
    });
  }

  const fs::path folder_;
  ParamStore& store_;
  Optimizer* optimizer_;
  const Manifest manifest_;
  const Saved saved_;
  Files files_;
  std::vector<Copy> copies_;
  std::map<const SavedSlice*, std::set<size_t>> needed_;  // and which of its checksums
  uint64_t bytes_ = 0;                                    // read
};

}  // namespace

LoadedCheckpoint load_checkpoint(const fs::path& folder, ParamStore& store, Optimizer* optimizer) {
  std::optional<Loader> loader;
  // With patience: one host may have in memory what another reads from a disk.
  agree_patiently(store.mesh().all(), [&](const std::atomic<bool>& lost) {
    loader.emplace(folder, store, optimizer);
    loader->check(lost);
  });
  return loader->write();
}

}  // namespace titanium
