#include "titanium/weights/hf_export.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <map>

#include "titanium/base/error.h"
#include "titanium/weights/scalar_type.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kPiece = 1 << 20;  // elements in memory at a time

constexpr const char* kCopied[] = {"tokenizer.json",
                                   "tokenizer_config.json",
                                   "special_tokens_map.json",
                                   "added_tokens.json",
                                   "vocab.json",
                                   "merges.txt",
                                   "tokenizer.model",
                                   "chat_template.jinja",
                                   "chat_template.json",
                                   "generation_config.json"};

constexpr const char* kTemplate = "chat_template.jinja";
constexpr const char* kMoreTemplates = "additional_chat_templates";
constexpr const char* kMark = "titanium_export.json";

void check(const std::error_code& error, const fs::path& path, const char* what) {
  if (error) throw BadCheckpoint("{}: {}: {}", path.string(), what, error.message());
}

// Files and folders, sorted.
std::vector<std::string> files_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator it(folder, error);
  for (; !error && it != fs::directory_iterator(); it.increment(error))
    names.push_back(it->path().filename().string());
  check(error, folder, "cannot be read");
  std::sort(names.begin(), names.end());
  return names;
}

// Whole weights out of this rank's slices, converted piece by piece.
TensorSource source_of(const Weight& weight, std::vector<Slice> slices, Dtype dtype) {
  TensorSource source;
  source.spec = {weight.name(), dtype, weight.shape()};
  source.produce = [slices = std::move(slices), dtype](const ByteSink& sink) {
    std::vector<std::byte> buffer;
    for (const Slice& slice : slices) {
      const at::Tensor values = slice.of(slice.unit->shard());
      const Dtype master = to_dtype(values.scalar_type());
      const auto* data = static_cast<const std::byte*>(values.const_data_ptr());
      for (int64_t at = 0; at < values.numel(); at += kPiece) {
        const int64_t count = std::min(kPiece, values.numel() - at);
        const std::byte* from = data + at * size_of(master);
        if (master == dtype) {
          sink({from, static_cast<size_t>(count * size_of(master))});
          continue;
        }
        buffer.resize(static_cast<size_t>(count * size_of(dtype)));
        convert(from, master, buffer.data(), dtype, count);
        sink(buffer);
      }
    }
  };
  return source;
}

std::vector<TensorSource> sources_of(const ParamStore& store, std::optional<Dtype> dtype) {
  std::map<const Weight*, std::vector<Slice>> slices;
  for (const Slice& slice : store.slices()) slices[slice.weight].push_back(slice);
  std::vector<TensorSource> sources;
  for (const auto& weight : store.table().weights()) {
    const auto& own = slices[weight.get()];
    int64_t covered = 0;
    for (const Slice& slice : own) covered += slice.end - slice.begin;
    if (covered != weight->numel()) {
      throw Bug("export of '{}': this rank holds {} of {} elements", weight->name(), covered,
                weight->numel());
    }
    sources.push_back(source_of(*weight, own, dtype.value_or(to_dtype(weight->unit().dtypes().param))));
  }
  return sources;
}

void write_folder(const ParamStore& store, Json config, const fs::path& folder,
                  const HfExportOptions& options) {
  std::error_code error;
  fs::create_directories(folder, error);
  check(error, folder, "cannot be made");
  const std::vector<TensorSource> sources = sources_of(store, options.dtype);
  HfWriteOptions write;
  write.max_shard_bytes = options.max_shard_bytes;
  write.fsync = options.fsync;
  write_hf_tensors(folder, sources, write);
  // transformers reads the dtype to load in from here: `dtype` since 5.0, `torch_dtype` before.
  if (!sources.empty()) {
    config[config.contains("dtype") ? "dtype" : "torch_dtype"] = torch_name(sources.front().spec.dtype);
  }
  export_hf_config(config, folder, options.tokenizer_from);
  if (options.chat_template) {
    fs::remove(folder / "chat_template.json", error);
    check(error, folder / "chat_template.json", "cannot be removed");
    write_file(folder / kTemplate, *options.chat_template);
  }
  if (!options.owner.empty()) {
    Json files = files_in(folder);
    files.push_back(kMark);
    write_file(folder / kMark, Json{{"owner", options.owner}, {"files", std::move(files)}}.dump(2) + "\n");
  }
}

// The folder without the "/" that may end its name.
fs::path target_of(const fs::path& folder) {
  return folder.has_filename() ? folder : folder.parent_path();
}

fs::path replaced_of(fs::path target) {
  return target += ".replaced";
}

// Why an export of this owner may not replace the folder; empty where it may.
std::string why_not_ours(const fs::path& target, const std::string& owner) {
  std::error_code error;
  if (!fs::exists(target / kMark, error))
    return fmt::format("was not written by this run (it has no {})", kMark);
  const Json mark = read_json(target / kMark);
  const Json files = mark.is_object() ? mark.value("files", Json()) : Json();
  if (!files.is_array() || mark.value("owner", Json()) != Json(owner)) return "was written by another run";
  for (const std::string& name : files_in(target)) {
    if (std::find(files.begin(), files.end(), Json(name)) == files.end())
      return fmt::format("holds '{}', which the export did not write", name);
  }
  return "";
}

// What stands where the export goes.  BadCheckpoint where it may not be replaced.
bool must_replace(const fs::path& target, const HfExportOptions& options) {
  std::error_code error;
  const bool folder = fs::is_directory(target, error);
  if (!fs::exists(target, error) || (folder && fs::is_empty(target, error))) return false;
  if (!options.overwrite) throw BadCheckpoint("{}: exists already; choose another folder", target.string());
  if (!folder || !fs::exists(target / "config.json", error)) {
    throw BadCheckpoint("{}: is not a Hugging Face folder (no config.json), so it is not replaced",
                        target.string());
  }
  const std::string why = options.owner.empty() ? "" : why_not_ours(target, options.owner);
  if (!why.empty()) throw BadCheckpoint("{}: {}, so it is not replaced", target.string(), why);
  return true;
}

}  // namespace

void check_hf_export(const fs::path& folder, const HfExportOptions& options) {
  must_replace(target_of(folder), options);
}

void export_hf_config(const Json& config, const fs::path& folder, const fs::path& tokenizer_from) {
  std::error_code error;
  fs::create_directories(folder, error);
  check(error, folder, "cannot be made");
  write_file(folder / "config.json", config.dump(2) + "\n");
  if (tokenizer_from.empty()) return;
  for (const char* name : kCopied) {
    if (!fs::exists(tokenizer_from / name, error)) continue;
    write_file(folder / name, read_file(tokenizer_from / name));
  }
  if (!fs::is_directory(tokenizer_from / kMoreTemplates, error)) return;
  fs::create_directories(folder / kMoreTemplates, error);
  check(error, folder / kMoreTemplates, "cannot be made");
  for (const std::string& name : files_in(tokenizer_from / kMoreTemplates)) {
    if (fs::path(name).extension() != ".jinja") continue;
    write_file(folder / kMoreTemplates / name, read_file(tokenizer_from / kMoreTemplates / name));
  }
}

void export_hf(const ParamStore& store, const Json& config, const fs::path& folder,
               const HfExportOptions& options) {
  if (options.dtype && !is_floating(*options.dtype)) {
    throw BadConfig("export dtype {}: allowed: float32, bfloat16, float16, float64",
                    torch_name(*options.dtype));
  }
  const fs::path target = target_of(folder), replaced = replaced_of(target);
  fs::path partial = target;
  partial += ".partial";
  std::error_code error;
  if (!fs::exists(target, error) && fs::exists(replaced / "config.json", error)) {
    fs::rename(replaced, target, error);  // a kill came between the two renames below
    check(error, replaced, "cannot be put back");
  }
  const bool there = must_replace(target, options);
  fs::remove_all(partial, error);
  check(error, partial, "an interrupted export cannot be removed");
  try {
    write_folder(store, config, partial, options);
    if (there) {
      fs::remove_all(replaced, error);
      check(error, replaced, "cannot be removed");
      fs::rename(target, replaced, error);
      check(error, target, "cannot be moved away");
    }
    fs::rename(partial, target, error);
    check(error, target, "cannot be put in place");
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(partial, ignored);
    if (there && !fs::exists(target, ignored)) fs::rename(replaced, target, ignored);
    throw;
  }
  if (options.fsync) sync_folder(target.has_parent_path() ? target.parent_path() : fs::path("."));
  if (there) fs::remove_all(replaced, error);
  check(error, replaced, "the export is complete, but the older one cannot be removed");
}

}  // namespace titanium
