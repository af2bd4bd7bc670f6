// What a checkpoint folder says about itself: manifest.json, and COMPLETE with the manifest's checksum.
//
// {"format": "titanium checkpoint", "version": 2, "step": 12, "optimizer": {"name": "AdamW", "updates": 12},
// "train": {...},
//  "files": [{"name": "master-00000.safetensors", "size": 1234, "header_xxh64": "..."}, ...],
//  "slices": [{"weight": "model.norm.weight", "state": "master", "file": 0, "dtype": "F32", "shape": [64],
//              "range": [0, 64], "xxh64": "..."}, ...]}
//
// A slice that has not all columns of its weight says which: "columns": [0, 32], and counts its range in
// them. Version 1 had no such slices, and one checksum for all of a slice.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "titanium/formats/dtype.h"
#include "titanium/formats/json.h"
#include "titanium/weights/piece.h"

namespace titanium {

constexpr const char* kMaster = "master";  // the `state` of the masters; others are optimizer state names

struct SavedFile {
  std::string name;          // in the checkpoint's folder
  uint64_t size = 0;         // bytes
  uint64_t header_hash = 0;  // of all bytes before the first tensor
};

// A part of a weight: the tensor of the weight's name in the file, in the weight's own shape when it is all
// of it, else flat.
struct SavedSlice {
  std::string weight, state;
  size_t file = 0;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;  // of the whole weight
  Piece piece;                 // "range" and "columns"
  // Of each Manifest::hashed bytes of the tensor, the last ones may be fewer: "xxh64" has their digits in a
  // row.
  std::vector<uint64_t> hashes;
};

struct Manifest {
  static constexpr uint64_t kHashed = 1 << 20;
  uint64_t hashed = kHashed;  // bytes that one checksum is of
  int64_t step = 0;
  std::string optimizer;  // empty: masters only
  int64_t updates = 0;
  Json train;
  std::vector<SavedFile> files;
  std::vector<SavedSlice> slices;
};

// manifest.json, flushed to disk; `mark_complete` then makes the folder a checkpoint.  BadCheckpoint with the
// system's reason.
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
void mark_complete(const std::filesystem::path& folder);

// BadCheckpoint: no COMPLETE, a manifest that is not the one it was made for, not JSON, of another version,
// with a value of the wrong kind or out of range, a file that is missing or of another size.  Names folder or
// file.  Tensors are not read.
Manifest read_manifest(const std::filesystem::path& folder);

// BadCheckpoint where a file is missing or of another size.
void check_files(const std::filesystem::path& folder, const Manifest& manifest);

// The files and slices of a manifest as text, for other ranks.  BadCheckpoint as read_manifest.
std::string saved_text(const Manifest& manifest);
// Adds the files and slices of such a text to a manifest; slices refer to the files that come with them.
void add_saved(const std::string& text, Manifest& manifest);

// The names of checkpoints and of what killed saves leave behind.
std::string checkpoint_name(int64_t step);  // "step-12"
bool parse_checkpoint_name(const std::string& name, int64_t* step,
                           std::string* ending);  // ending: "", ".partial", ".replaced"

}  // namespace titanium
