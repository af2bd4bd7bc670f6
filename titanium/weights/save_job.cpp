#include "titanium/weights/save_job.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/formats/safetensors.h"
#include "titanium/weights/checkpoint_folder.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/patience.h"
#include "titanium/weights/scalar_type.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

// Bytes taken from a live tensor at a time: they stay in the core's cache between copy, hash and write, and
// an update never waits for more than this copy.  And what one checksum is of.
constexpr int64_t kPiece = Manifest::kHashed;

Metadata metadata_of(const Manifest& manifest) {
  return {{"format", "pt"}, {"step", std::to_string(manifest.step)}};
}

// Whatever else goes wrong in a save is a BadCheckpoint too.
void as_checkpoint(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw BadCheckpoint("the checkpoint could not be saved: {}", e.what());
  }
}

}  // namespace

SaveJob::SaveJob(const ParamStore& store, const Optimizer* optimizer, int64_t step, Json train,
                 const CheckpointOptions& options, Group ranks)
    : options_(options), ranks_(std::move(ranks)), piece_(kPiece) {
  manifest_.step = step;
  manifest_.train = std::move(train);
  std::map<const Unit*, std::vector<Slice>> slices;
  if (store.mesh().at().dp_replicate == 0) {  // the other copies own the same
    for (const Slice& slice : store.slices()) slices[slice.unit].push_back(slice);
  }
  for (const auto& unit : store.units()) {
    UnitWork& work = work_.emplace_back();
    work.unit = unit.get();
    index_[unit.get()] = work_.size() - 1;
    add_part(work, kMaster, unit->shard(), slices[unit.get()]);
    if (optimizer == nullptr) continue;
    for (const std::string& state : optimizer->state_names()) {
      const at::Tensor flat = optimizer->state(*unit, state);
      if (flat.defined()) add_part(work, state, flat, slices[unit.get()]);  // absent: zeros
    }
  }
  for (File& file : files_)
    file.saved.name = fmt::format("{}-{:05}.safetensors", file.state, store.mesh().rank());
  if (optimizer != nullptr) {
    manifest_.optimizer = optimizer->name();
    manifest_.updates = optimizer->updates();
  }
}

SaveJob::~SaveJob() = default;

void SaveJob::add_part(UnitWork& work, const std::string& state, const at::Tensor& flat,
                       const std::vector<Slice>& slices) {
  if (slices.empty()) return;
  size_t file = 0;
  while (file < files_.size() && files_[file].state != state) ++file;
  if (file == files_.size()) files_.emplace_back().state = state;
  const Dtype dtype = to_dtype(flat.scalar_type());
  for (const Slice& slice : slices) {
    const bool whole = slice.begin == 0 && slice.end == slice.weight->numel();
    files_[file].specs.push_back(
        {slice.weight->name(), dtype,
         whole ? slice.weight->shape() : std::vector<int64_t>{slice.end - slice.begin}});
  }
  work.bytes += flat.nbytes();
  work.parts.push_back({file, flat, {}, slices});
}

void SaveJob::before_write(const Unit& unit) {
  std::unique_lock lock(mutex_);
  const auto found = index_.find(&unit);
  if (found == index_.end()) return;
  UnitWork& work = work_[found->second];
  const auto free = [&] { return finished_ || work.written || work.copied; };
  const auto room = [&] {
    return work.bytes <= options_.snapshot_bytes - std::min(snapshot_, options_.snapshot_bytes);
  };
  changed_.wait(lock, [&] { return free() || room(); });
  if (free()) return;
  for (Part& part : work.parts) part.copy = part.live.clone();
  snapshot_ += work.bytes;
  work.copied = true;
}

void SaveJob::run(const std::string& refused) {
  std::exception_ptr error;
  try {
    save(refused);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }
  if (error) std::rethrow_exception(error);
}

void SaveJob::save(const std::string& refused) {
  const bool first = ranks_.rank() == 0;
  const fs::path partial = options_.folder / (checkpoint_name(manifest_.step) + ".partial");
  std::string mine;
  try {
    // With patience: deleting old checkpoints may take a file system long.
    agree_patiently(ranks_, [&](const std::atomic<bool>&) {
      as_checkpoint([&] {
        stage("files");
        if (!refused.empty()) throw BadCheckpoint("{}: {}", partial.string(), refused);
        if (!first) return;
        make_checkpoint_folder(options_.folder);
        clean_wrecks(options_.folder);
        make_checkpoint_folder(partial);
      });
    });
    agree_patiently(ranks_, [&](const std::atomic<bool>& lost) {
      try {
        as_checkpoint([&] { write_files(partial, lost); });
      } catch (...) {
        for (File& file : files_) file.writer.reset();
        throw;
      }
      if (ranks_.size() > 1) mine = for_rank_0();
    });
    const std::vector<std::string> all = ranks_.exchange(mine);
    agree_patiently(ranks_, [&](const std::atomic<bool>&) {
      if (first) as_checkpoint([&] { finish(partial, all); });
    });
  } catch (const RankLost&) {
    throw;  // others may still write there; the next save clears it away
  } catch (...) {
    // What was written is of no use, and its space may be what a full disk lacks.
    std::error_code ignored;
    if (first) fs::remove_all(partial, ignored);
    throw;
  }
}

std::string SaveJob::for_rank_0() const {
  return Json{{"step", manifest_.step},
              {"optimizer", manifest_.optimizer},
              {"updates", manifest_.updates},
              {"saved", saved_text(manifest_)}}
      .dump();
}

// On rank 0: from files of all ranks, and what each says of them, to a checkpoint.
void SaveJob::finish(const fs::path& partial, const std::vector<std::string>& all) {
  stage("manifest");
  if (all.size() > 1) add_files_of_others(partial, all);
  write_manifest(partial, manifest_);
  stage("complete");
  mark_complete(partial);
  stage("rename");
  put_in_place(partial);
  stage("prune");
  keep_latest(options_.folder, options_.keep_latest_k, manifest_.step);
}

void SaveJob::add_files_of_others(const fs::path& partial, const std::vector<std::string>& all) {
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const Json other = Json::parse(all[rank]);
    if (other.at("step") != manifest_.step || other.at("optimizer") != manifest_.optimizer ||
        other.at("updates") != manifest_.updates) {
      throw Bug("{}: rank {} saves step {} ({}, {} updates), rank 0 step {} ({}, {} updates)",
                partial.string(), rank, other.at("step").dump(), other.at("optimizer").dump(),
                other.at("updates").dump(), manifest_.step, manifest_.optimizer, manifest_.updates);
    }
    add_saved(other.at("saved").get<std::string>(), manifest_);
  }
  try {
    check_files(partial, manifest_);
  } catch (const BadCheckpoint& error) {
    throw BadCheckpoint("{} (the folder must be one that all ranks share)", error.what());
  }
}

void SaveJob::write_files(const fs::path& partial, const std::atomic<bool>& lost) {
  if (!files_.empty()) make_checkpoint_folder(partial);  // where rank 0's is not seen yet
  for (File& file : files_) {
    file.writer =
        std::make_unique<SafetensorsWriter>(partial / file.saved.name, file.specs, metadata_of(manifest_));
  }
  for (UnitWork& work : work_) {
    stage("unit " + work.unit->name());
    write_unit(work, lost);
  }
  for (File& file : files_) {
    stage("close " + file.saved.name);
    file.writer->close();
    file.writer.reset();
    const std::string header = safetensors_header(file.specs, metadata_of(manifest_));
    file.saved.header_hash = Hash64::of(std::as_bytes(std::span(header)));
    file.saved.size = header.size();
    for (const TensorSpec& spec : file.specs) file.saved.size += spec.nbytes();
    manifest_.files.push_back(file.saved);
  }
}

void SaveJob::write_unit(UnitWork& work, const std::atomic<bool>& lost) {
  for (Part& part : work.parts) {
    for (const Slice& slice : part.slices) {
      std::vector<uint64_t> hashes = write_slice(work, part, slice, lost);
      manifest_.slices.push_back({slice.weight->name(), files_[part.file].state, part.file,
                                  to_dtype(part.live.scalar_type()), slice.weight->shape(), piece_of(slice),
                                  std::move(hashes)});
    }
  }
  const std::lock_guard lock(mutex_);
  if (work.copied) {
    for (Part& part : work.parts) part.copy.reset();
    snapshot_ -= work.bytes;
  }
  work.written = true;
  changed_.notify_all();
}

std::vector<uint64_t> SaveJob::write_slice(UnitWork& work, Part& part, const Slice& slice,
                                           const std::atomic<bool>& lost) {
  std::vector<uint64_t> hashes;
  const auto width = static_cast<int64_t>(part.live.element_size());
  const int64_t end = (slice.offset + slice.end - slice.begin) * width;
  for (int64_t at = slice.offset * width; at < end; at += kPiece) {
    if (lost) throw RankLost("another rank is lost, so the save ends");
    const auto bytes = static_cast<size_t>(std::min(kPiece, end - at));
    {
      const std::lock_guard lock(mutex_);
      const at::Tensor& from = work.copied ? part.copy : part.live;
      std::memcpy(piece_.data(), static_cast<const std::byte*>(from.const_data_ptr()) + at, bytes);
    }
    const std::span<const std::byte> piece(piece_.data(), bytes);
    hashes.push_back(Hash64::of(piece));
    files_[part.file].writer->append(piece);
  }
  return hashes;
}

void SaveJob::stage(const std::string& name) const {
  if (options_.on_stage) options_.on_stage(name);
}

}  // namespace titanium
