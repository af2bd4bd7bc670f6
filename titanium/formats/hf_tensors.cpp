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

std::vector<Shard> cut_into_shards(std::span<const TensorSource> sources, uint64_t max_bytes) {
  std::vector<Shard> shards(1);
  uint64_t filled = 0;
  for (const TensorSource& source : sources) {
    const uint64_t bytes = source.spec.nbytes();
    if (!shards.back().empty() && bytes > max_bytes - std::min(filled, max_bytes)) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(&source);
    filled += bytes;
  }
  for (Shard& shard : shards) {  // wider dtypes first, so that every tensor is aligned
    std::stable_sort(shard.begin(), shard.end(), [](const TensorSource* a, const TensorSource* b) {
      return size_of(a->spec.dtype) > size_of(b->spec.dtype);
    });
  }
  return shards;
}

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

void write_hf_tensors(const std::filesystem::path& folder, std::span<const TensorSource> sources,
                      const HfWriteOptions& options) {
  refuse_old_weights(folder);
  std::set<std::string_view> seen;
  for (const TensorSource& source : sources) {
    if (!seen.insert(source.spec.name).second) {
      throw BadCheckpoint("{}: tensor '{}' is given twice", folder.string(), source.spec.name);
    }
  }
  const auto shards = cut_into_shards(sources, options.max_shard_bytes);
  if (shards.size() == 1) return write_shard(folder / kSingle, shards[0], options);

  Json weight_map = Json::object();
  uint64_t total = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto file = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
    write_shard(folder / file, shards[i], options);
    for (const TensorSource* source : shards[i]) {
      weight_map[source->spec.name] = file;
      total += source->spec.nbytes();
    }
  }
  const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
  write_file(folder / kIndex, index.dump(2) + "\n");
}

}  // namespace titanium
