#include "titanium/formats/hf_tensors.h"

#include <algorithm>
#include <set>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// tensor -> file, as the index says.
std::map<std::string, std::string> read_weight_map(const std::filesystem::path& path) {
  Json index;
  std::string why;
  std::string text;
  try {
    text = read_file(path, JsonLimits{}.max_bytes);
  } catch (const BadConfig& error) {
    throw BadCheckpoint("{}", error.what());
  }
  if (!try_parse_json(text, {}, &index, &why)) {
    throw BadCheckpoint("{}: not valid JSON: {}", path.string(), why);
  }
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    throw BadCheckpoint("{}: has no object 'weight_map'", path.string());
  }
  std::map<std::string, std::string> map;
  for (const auto& item : index["weight_map"].items()) {
    if (!item.value().is_string()) {
      throw BadCheckpoint("{}: weight_map['{}'] is not a file name", path.string(), item.key());
    }
    const auto& file = item.value().get_ref<const std::string&>();
    if (file.empty() || file == "." || file == ".." ||
        file.find_first_of(std::string_view("/\\\0", 3)) != file.npos) {
      throw BadCheckpoint("{}: weight_map['{}'] is {}: a shard must be a plain file name in the same folder",
                          path.string(), item.key(), item.value().dump());
    }
    map[item.key()] = file;
  }
  if (map.empty()) throw BadCheckpoint("{}: weight_map names no tensor", path.string());
  return map;
}

}  // namespace

void HfTensors::add_file(const std::filesystem::path& path) {
  files_.emplace_back(path);
  const auto& tensors = files_.back().tensors();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto [at, fresh] = tensors_.try_emplace(tensors[i].name, files_.size() - 1, i);
    if (!fresh) {
      throw BadCheckpoint("{}: tensor '{}' is duplicated: it is in {} too", path.string(), tensors[i].name,
                          files_[at->second.first].source());
    }
  }
}

HfTensors::HfTensors(const std::filesystem::path& folder) : folder_(folder.string()) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) throw BadCheckpoint("{}: is not a folder", folder_);
  if (fs::exists(folder / kSingle, ignored)) {
    add_file(folder / kSingle);
    return;
  }
  const auto index = folder / kIndex;
  if (!fs::exists(index, ignored)) {
    throw BadCheckpoint("{}: has neither {} nor {}", folder_, kSingle, kIndex);
  }

  const auto map = read_weight_map(index);
  std::set<std::string> shards;
  for (const auto& [tensor, file] : map) shards.insert(file);
  for (const auto& file : shards) {
    if (!fs::exists(folder / file, ignored)) {
      throw BadCheckpoint("{}: names the shard '{}', which is missing", index.string(), file);
    }
    add_file(folder / file);
  }
  for (const auto& [tensor, file] : map) {
    const auto at = tensors_.find(tensor);
    if (at == tensors_.end()) {
      throw BadCheckpoint("{}: tensor '{}' is missing: the index puts it into '{}', which does not hold it",
                          index.string(), tensor, file);
    }
    const std::string& actual = files_[at->second.first].source();
    if (actual != (folder / file).string()) {
      throw BadCheckpoint("{}: tensor '{}' is missing from '{}', where the index puts it; it is in {}",
                          index.string(), tensor, file, actual);
    }
  }
  for (const auto& [tensor, where] : tensors_) {
    if (!map.count(tensor)) {
      throw BadCheckpoint("{}: tensor '{}' is unexpected: {} holds it, the index does not name it",
                          index.string(), tensor, files_[where.first].source());
    }
  }
}

std::vector<std::string> HfTensors::names() const {
  std::vector<std::string> names;
  for (const auto& [name, where] : tensors_) names.push_back(name);
  return names;
}

const TensorView* HfTensors::find(std::string_view name) const {
  const auto at = tensors_.find(name);
  return at == tensors_.end() ? nullptr : &files_[at->second.first].tensors()[at->second.second];
}

const TensorView& HfTensors::at(std::string_view name) const {
  const TensorView* view = find(name);
  if (view == nullptr) throw BadCheckpoint("{}: has no tensor '{}'", folder_, name);
  return *view;
}

uint64_t HfTensors::total_bytes() const {
  uint64_t sum = 0;
  for (const auto& file : files_) {
    for (const auto& tensor : file.tensors()) sum += tensor.nbytes;
  }
  return sum;
}

namespace {

using Shard = std::vector<const TensorSource*>;

void write_shard(const std::filesystem::path& path, const Shard& shard, const HfWriteOptions& options) {
  std::vector<TensorSpec> specs;
  for (const TensorSource* source : shard) specs.push_back(source->spec);
  SafetensorsWriter writer(path, std::move(specs), options.metadata, {options.fsync});
  for (const TensorSource* source : shard) {
    const uint64_t expected = source->spec.nbytes();
    uint64_t given = 0;
    source->produce([&](std::span<const std::byte> bytes) {
      given += bytes.size();
      if (given > expected) {
        throw BadCheckpoint("{}: tensor '{}' has {} bytes, more were produced", path.string(),
                            source->spec.name, expected);
      }
      writer.append(bytes);
    });
    if (given != expected) {
      throw BadCheckpoint("{}: tensor '{}' has {} bytes, {} were produced", path.string(), source->spec.name,
                          expected, given);
    }
  }
  writer.close();
}

void refuse_old_weights(const std::filesystem::path& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string file = entry.path().filename().string();
    if (file == kIndex || (file.starts_with("model") && file.ends_with(".safetensors"))) {
      throw BadCheckpoint("{}: holds weights already ({}); choose an empty folder", folder.string(), file);
    }
  }
  if (error) throw BadCheckpoint("{}: cannot be read: {}", folder.string(), error.message());
}

}  // namespace

std::vector<HfFile> lay_out_hf_files(std::span<const TensorSpec> specs, uint64_t max_shard_bytes) {
  std::set<std::string_view> seen;
  std::vector<HfFile> files(1);
  uint64_t filled = 0;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (!seen.insert(specs[i].name).second) throw BadCheckpoint("tensor '{}' is given twice", specs[i].name);
    const uint64_t bytes = specs[i].nbytes();
    if (!files.back().tensors.empty() && bytes > max_shard_bytes - std::min(filled, max_shard_bytes)) {
      files.emplace_back();
      filled = 0;
    }
    files.back().tensors.push_back(i);
    filled += bytes;
  }
  for (size_t i = 0; i < files.size(); ++i) {
    files[i].name =
        files.size() == 1 ? kSingle : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    std::stable_sort(files[i].tensors.begin(), files[i].tensors.end(),
                     [&](size_t a, size_t b) { return size_of(specs[a].dtype) > size_of(specs[b].dtype); });
  }
  return files;
}

void write_hf_index(const std::filesystem::path& folder, std::span<const TensorSpec> specs,
                    std::span<const HfFile> files) {
  if (files.size() < 2) return;
  Json weight_map = Json::object();
  uint64_t total = 0;
  for (const HfFile& file : files) {
    for (const size_t i : file.tensors) {
      weight_map[specs[i].name] = file.name;
      total += specs[i].nbytes();
    }
  }
  const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  write_file(folder / kIndex, index.dump(2) + "\n");
}

void write_hf_tensors(const std::filesystem::path& folder, std::span<const TensorSource> sources,
                      const HfWriteOptions& options) {
  refuse_old_weights(folder);
  std::vector<TensorSpec> specs;
  for (const TensorSource& source : sources) specs.push_back(source.spec);
  std::vector<HfFile> files;
  try {
    files = lay_out_hf_files(specs, options.max_shard_bytes);
  } catch (const BadCheckpoint& error) {
    throw BadCheckpoint("{}: {}", folder.string(), error.what());
  }
  for (const HfFile& file : files) {
    Shard shard;
    for (const size_t i : file.tensors) shard.push_back(&sources[i]);
    write_shard(folder / file.name, shard, options);
  }
  write_hf_index(folder, specs, files);
}

}  // namespace titanium
