#include "titanium/weights/hf_export.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <optional>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/weights/patience.h"
#include "titanium/weights/piece.h"
#include "titanium/weights/scalar_type.h"
#include "titanium/weights/shared_file.h"

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

// The weights' files: what is in them, and where.
struct Files {
  std::vector<const Weight*> weights;
  std::vector<TensorSpec> specs;  // of the weights
  std::vector<HfFile> files;
  std::vector<std::string> heads;  // of the files
};

Files lay_out(const ParamStore& store, const HfExportOptions& options) {
  Files all;
  for (const auto& weight : store.table().weights()) {
    const Dtype dtype = options.dtype.value_or(to_dtype(store.dtypes().param));
    all.weights.push_back(weight.get());
    all.specs.push_back({weight->name(), dtype, weight->shape()});
  }
  all.files = lay_out_hf_files(all.specs, options.max_shard_bytes);
  for (const HfFile& file : all.files) {
    std::vector<TensorSpec> specs;
    for (const size_t i : file.tensors) specs.push_back(all.specs[i]);
    all.heads.push_back(safetensors_header(specs, HfWriteOptions{}.metadata));
  }
  return all;
}

// A slice, converted piece by piece, to where its runs lie in a tensor that begins at byte `at`.
void write_slice(SharedFile& file, const Slice& slice, Dtype dtype, uint64_t at) {
  std::vector<std::byte> buffer;
  for (const Slice& part : parts_of(slice, kPiece)) {
    const at::Tensor values = part.of(part.unit->shard()).cpu();
    const Dtype master = to_dtype(values.scalar_type());
    const auto* bytes = static_cast<const std::byte*>(values.const_data_ptr());
    if (master != dtype) {
      buffer.resize(static_cast<size_t>(part.count() * size_of(dtype)));
      convert(bytes, master, buffer.data(), dtype, part.count());
      bytes = buffer.data();
    }
    const int64_t width = size_of(dtype);
    part.each_run([&](const Slice::Run& run) {
      file.write({bytes + run.begin * width, static_cast<size_t>(run.count * width)},
                 at + static_cast<uint64_t>(run.global * width));
    });
  }
}

// What this rank owns, in every file.
void write_slices(const ParamStore& store, const Files& all, const fs::path& folder, bool fsync,
                  const std::atomic<bool>& lost) {
  if (store.mesh().at().dp_replicate != 0) return;  // the first copy writes
  std::map<const Weight*, Slice> slices;
  for (const Slice& slice : store.slices()) slices.emplace(slice.weight, slice);
  for (size_t i = 0; i < all.files.size(); ++i) {
    std::optional<SharedFile> file;
    uint64_t at = all.heads[i].size();
    for (const size_t tensor : all.files[i].tensors) {
      const TensorSpec& spec = all.specs[tensor];
      if (const auto own = slices.find(all.weights[tensor]); own != slices.end()) {
        if (lost) throw RankLost("another rank is lost, so the export ends");
        if (!file) file.emplace(folder / all.files[i].name);
        write_slice(*file, own->second, spec.dtype, at);
      }
      at += spec.nbytes();
    }
    if (file && fsync) file->sync();
  }
}

void make_files(const Files& all, const fs::path& folder, bool fsync) {
  std::error_code error;
  fs::create_directories(folder, error);
  check(error, folder, "cannot be made");
  for (size_t i = 0; i < all.files.size(); ++i) {
    uint64_t size = all.heads[i].size();
    for (const size_t tensor : all.files[i].tensors) size += all.specs[tensor].nbytes();
    SharedFile::create(folder / all.files[i].name, all.heads[i], size, fsync);
  }
}

// Everything of the folder but the weights.
void write_rest(const Files& all, Json config, const fs::path& folder, const HfExportOptions& options) {
  write_hf_index(folder, all.specs, all.files);
  // transformers reads the dtype to load in from here: `dtype` since 5.0, `torch_dtype` before.
  if (!all.specs.empty()) {
    config[config.contains("dtype") ? "dtype" : "torch_dtype"] = torch_name(all.specs.front().dtype);
  }
  export_hf_config(config, folder, options.tokenizer_from);
  if (options.chat_template) {
    std::error_code error;
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

// What a kill between the two renames of put_in_place() left.
void put_back(const fs::path& target) {
  const fs::path replaced = replaced_of(target);
  std::error_code error;
  if (fs::exists(target, error) || !fs::exists(replaced / "config.json", error)) return;
  fs::rename(replaced, target, error);
  check(error, replaced, "cannot be put back");
}

void put_in_place(const fs::path& partial, const fs::path& target, bool there) {
  const fs::path replaced = replaced_of(target);
  std::error_code error;
  if (there) {
    fs::remove_all(replaced, error);
    check(error, replaced, "cannot be removed");
    fs::rename(target, replaced, error);
    check(error, target, "cannot be moved away");
  }
  fs::rename(partial, target, error);
  check(error, target, "cannot be put in place");
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
  const Group& ranks = store.mesh().all();
  const bool first = store.mesh().rank() == 0;
  const fs::path target = target_of(folder), replaced = replaced_of(target);
  fs::path partial = target;
  partial += ".partial";
  bool there = false;
  Files files;
  agree_patiently(ranks, [&](const std::atomic<bool>&) {  // an old export may take long to be removed
    files = lay_out(store, options);
    if (!first) return;
    put_back(target);
    there = must_replace(target, options);
    std::error_code error;
    fs::remove_all(partial, error);
    check(error, partial, "an interrupted export cannot be removed");
  });
  try {
    agree(ranks, [&] {
      if (first) make_files(files, partial, options.fsync);
    });
    agree_patiently(ranks, [&](const std::atomic<bool>& lost) {
      write_slices(store, files, partial, options.fsync, lost);
    });
    agree(ranks, [&] {
      if (!first) return;
      write_rest(files, config, partial, options);
      put_in_place(partial, target, there);
    });
  } catch (...) {
    std::error_code ignored;
    if (first) {
      fs::remove_all(partial, ignored);
      if (there && !fs::exists(target, ignored)) fs::rename(replaced, target, ignored);
    }
    throw;
  }
  agree_patiently(ranks, [&](const std::atomic<bool>&) {
    if (!first) return;
    if (options.fsync) sync_folder(target.has_parent_path() ? target.parent_path() : fs::path("."));
    std::error_code error;
    if (there) fs::remove_all(replaced, error);
    check(error, replaced, "the export is complete, but the older one cannot be removed");
  });
}

}  // namespace titanium
