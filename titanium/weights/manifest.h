// What a checkpoint folder says about itself: manifest.json, and COMPLETE with the manifest's checksum.
//
// {"format": "titanium checkpoint", "version": 1, "step": 12, "optimizer": {"name": "AdamW", "updates": 12},
// "train": {...},
//  "files": [{"name": "master-00000.safetensors", "size": 1234, "header_xxh64": "..."}, ...],
//  "slices": [{"weight": "model.norm.weight", "state": "master", "file": 0, "dtype": "F32", "shape": [64],
//              "range": [0, 64], "xxh64": "..."}, ...]}
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "titanium/formats/dtype.h"
#include "titanium/formats/json.h"

namespace titanium {

constexpr const char* kMaster = "master";  // the `state` of the masters; others are optimizer state names

struct SavedFile {
  std::string name;          // in the checkpoint's folder
  uint64_t size = 0;         // bytes
  uint64_t header_hash = 0;  // of all bytes before the first tensor
};

// Elements [begin, end) of a weight, counted row-major: the tensor of the weight's name in the file, in the
// weight's own shape when it is all of it, else flat.
struct SavedSlice {
  std::string weight, state;
  size_t file = 0;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;  // of the whole weight
  int64_t begin = 0, end = 0;
  uint64_t hash = 0;  // of the tensor's bytes
};

struct Manifest {
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

// The names of checkpoints and of what killed saves leave behind.
std::string checkpoint_name(int64_t step);  // "step-12"
bool parse_checkpoint_name(const std::string& name, int64_t* step,
                           std::string* ending);  // ending: "", ".partial", ".replaced"

}  // namespace titanium
