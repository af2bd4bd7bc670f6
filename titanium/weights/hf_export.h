// A ParamStore as a Hugging Face folder.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>

#include "titanium/formats/hf_tensors.h"
#include "titanium/formats/json.h"
#include "titanium/shard/param_store.h"

namespace titanium {

struct HfExportOptions {
  std::optional<Dtype> dtype = {};  // F32, BF16, F16, F64; empty: as the masters are
  // A folder whose tokenizer, chat template and generation files are copied; empty: none.
  std::filesystem::path tokenizer_from = {};
  // In place of that folder's default chat template, as chat_template.jinja.
  std::optional<std::string> chat_template = {};
  uint64_t max_shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;
  bool overwrite = false;  // replace a folder of that name
  // Who makes the export.  Where it is not empty, titanium_export.json in the folder says so, and `overwrite`
  // replaces nothing but an export of the same owner to which nothing was added since.
  std::string owner = {};
  bool fsync = true;
};

// BadCheckpoint where export_hf with these options would refuse the folder for what it holds already.
void check_hf_export(const std::filesystem::path& folder, const HfExportOptions& options);

// Writes safetensors (and an index where there are several files), `config` as config.json with its dtype key
// set to what was written, and the tokenizer's files.  Called by all ranks of the store's mesh: each writes
// what it owns to its place in the files, a few MB of it in memory at a time, into one folder that all share;
// the bytes are those that one rank writes.  A tied weight is written once, under its own name.  The folder
// is written aside and renamed: after a BadCheckpoint (exists already, disk refuses; the same on all ranks)
// there is no new folder and the old one is whole.  What a killed export moved away is put back first.
void export_hf(const ParamStore& store, const Json& config, const std::filesystem::path& folder,
               const HfExportOptions& options = {});

// The files of that folder but the weights: config.json, and the tokenizer's from `tokenizer_from` where it
// is not empty.  Files that are there already are replaced one by one.  BadCheckpoint.
void export_hf_config(const Json& config, const std::filesystem::path& folder,
                      const std::filesystem::path& tokenizer_from);

}  // namespace titanium
