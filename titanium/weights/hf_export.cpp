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

void check(const std::error_code& error, const fs::path& path, const char* what) {
  if (error) throw BadCheckpoint("{}: {}: {}", path.string(), what, error.message());
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
  write_file(folder / "config.json", config.dump(2) + "\n");
  if (options.tokenizer_from.empty()) return;
  for (const char* name : kCopied) {
    if (!fs::exists(options.tokenizer_from / name, error)) continue;
    write_file(folder / name, read_file(options.tokenizer_from / name));
  }
}

}  // namespace

void export_hf(const ParamStore& store, const Json& config, const fs::path& folder,
               const HfExportOptions& options) {
  if (options.dtype && !is_floating(*options.dtype)) {
    throw BadConfig("export dtype {}: allowed: float32, bfloat16, float16, float64",
                    torch_name(*options.dtype));
  }
  std::error_code error;
  fs::path target = folder;
  if (!target.has_filename()) target = target.parent_path();  // "hf/"
  const bool there =
      fs::exists(target, error) && !(fs::is_directory(target, error) && fs::is_empty(target, error));
  if (there && !options.overwrite)
    throw BadCheckpoint("{}: exists already; choose another folder", target.string());
  if (there && !fs::exists(target / "config.json", error)) {
    throw BadCheckpoint("{}: is not a Hugging Face folder (no config.json), so it is not replaced",
                        target.string());
  }

  fs::path partial = target, replaced = target;
  partial += ".partial";
  replaced += ".replaced";
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
