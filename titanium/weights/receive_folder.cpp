#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <set>

#include "titanium/base/error.h"
#include "titanium/formats/hf_tensors.h"
#include "titanium/formats/json.h"
#include "titanium/weights/receive_target.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVersion = "titanium.version";  // in the metadata of the file, or of the index
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kPartial = ".sync-partial";

int64_t parse_version(const std::string& text, const fs::path& path) {
  int64_t version = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), version);
  if (error != std::errc() || end != text.data() + text.size() || version < 0) {
    throw BadCheckpoint("{}: its metadata '{}' is '{}', not a number from 0 up", path.string(), kVersion,
                        text);
  }
  return version;
}

// "model-00001-of-00002.v7.safetensors" -> "model-00001-of-00002"
std::string stem_of(const std::string& file) {
  std::string stem = fs::path(file).stem().string();
  const size_t mark = stem.rfind(".v");
  const bool versioned = mark != stem.npos && mark + 2 < stem.size() &&
                         stem.find_first_not_of("0123456789", mark + 2) == stem.npos;
  return versioned ? stem.substr(0, mark) : stem;
}

bool holds(const fs::path& path, const std::string& text) {
  try {
    return read_file(path) == text;
  } catch (const Error&) {
    return false;
  }
}

// A file of the folder, written anew aside: the layout is the old file's, tensors come in any order.
class NewFile {
 public:
  NewFile(const SafetensorsFile& old, fs::path path, Metadata metadata) : old_(old), path_(std::move(path)) {
    partial_ = path_;
    partial_ += kPartial;
    std::vector<TensorSpec> specs;
    for (const TensorView& tensor : old.tensors()) specs.push_back({tensor.name, tensor.dtype, tensor.shape});
    const std::string header = safetensors_header(specs, metadata);
    uint64_t at = header.size();
    for (const TensorView& tensor : old.tensors()) {
      offsets_[tensor.name] = at;
      at += tensor.nbytes;
    }
    fd_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd_ < 0) fail("cannot be created");
    try {
      write(std::as_bytes(std::span(header)), 0);
    } catch (...) {
      discard();
      throw;
    }
  }
  ~NewFile() { discard(); }
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  const fs::path& path() const { return path_; }

  void write(const TensorView& tensor) {
    write({tensor.data, tensor.nbytes}, offsets_.at(tensor.name));
    written_.insert(tensor.name);
  }

  // Takes from the old file what did not come.
  void finish(bool fsync) {
    for (const TensorView& tensor : old_.tensors()) {
      if (!written_.count(tensor.name)) write(tensor);
    }
    if (fsync && ::fsync(fd_) != 0) fail("cannot be flushed to disk");
  }
  void put_in_place() {
    if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("cannot be put in place");
    ::close(fd_);
    fd_ = -1;
  }

 private:
  void discard() {
    if (fd_ < 0) return;
    ::close(fd_);
    ::unlink(partial_.c_str());
    fd_ = -1;
  }
  void write(std::span<const std::byte> bytes, uint64_t at) {
    while (!bytes.empty()) {
      const ssize_t n =
          ::pwrite(fd_, bytes.data(), std::min<size_t>(bytes.size(), 1 << 30), static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("cannot be written");
      bytes = bytes.subspan(static_cast<size_t>(n));
      at += static_cast<uint64_t>(n);
    }
  }
  [[noreturn]] void fail(const char* what) const {
    throw BadCheckpoint("{}: {}: {}", path_.string(), what, std::strerror(errno));
  }

  const SafetensorsFile& old_;
  fs::path path_, partial_;
  int fd_ = -1;
  std::map<std::string, uint64_t> offsets_;
  std::set<std::string> written_;
};

class FolderTarget final : public ReceiveTarget {
 public:
  FolderTarget(fs::path folder, bool fsync) : folder_(std::move(folder)), fsync_(fsync) { look(); }

  std::string what() const override { return folder_.string(); }
  std::vector<std::string> names() const override { return tensors_->names(); }
  std::optional<int64_t> version() const override { return version_; }

  const TensorSpec* find(const std::string& name) const override {
    const auto found = specs_.find(name);
    return found == specs_.end() ? nullptr : &found->second;
  }

  void look() override {
    drop();
    tensors_ = std::make_unique<HfTensors>(folder_);
    specs_.clear();
    for (const SafetensorsFile& file : tensors_->files()) {
      for (const TensorView& tensor : file.tensors())
        specs_[tensor.name] = {tensor.name, tensor.dtype, tensor.shape};
    }
    std::error_code error;
    sharded_ = !fs::exists(folder_ / "model.safetensors", error);
    version_.reset();
    if (sharded_) {
      index_ = read_json(folder_ / kIndex);
      if (!index_.contains("metadata") || !index_["metadata"].is_object())
        index_["metadata"] = Json::object();
      const auto found = index_["metadata"].find(kVersion);
      if (found != index_["metadata"].end())
        version_ =
            parse_version(found->is_string() ? found->get<std::string>() : found->dump(), folder_ / kIndex);
    } else {
      const Metadata& metadata = tensors_->files().front().metadata();
      const auto found = metadata.find(kVersion);
      if (found != metadata.end()) version_ = parse_version(found->second, folder_ / "model.safetensors");
    }
  }

  void begin(const std::vector<std::string>& updated, int64_t version) override {
    clean();
    const std::set<std::string> names(updated.begin(), updated.end());
    for (const SafetensorsFile& file : tensors_->files()) {
      const auto& tensors = file.tensors();
      const bool touched = std::any_of(tensors.begin(), tensors.end(),
                                       [&](const TensorView& t) { return names.count(t.name) > 0; });
      if (!touched && sharded_) continue;  // the index goes on naming the old file
      const std::string old = fs::path(file.source()).filename().string();
      const std::string name = sharded_ ? fmt::format("{}.v{}.safetensors", stem_of(old), version) : old;
      Metadata metadata = file.metadata();
      metadata.try_emplace("format", "pt");
      metadata[kVersion] = std::to_string(version);
      files_.push_back(std::make_unique<NewFile>(file, folder_ / name, metadata));
      for (const TensorView& tensor : tensors) file_of_[tensor.name] = files_.back().get();
    }
  }

  void apply(const TensorView& tensor) override { file_of_.at(tensor.name)->write(tensor); }

  void commit(int64_t version) override {
    for (const auto& file : files_) file->finish(fsync_);
    if (!sharded_) {
      for (const auto& file : files_) file->put_in_place();  // the one
      if (fsync_) sync_folder(folder_);
      version_ = version;
      return;
    }
    Json index = index_;
    index["metadata"][kVersion] = std::to_string(version);
    for (const auto& [name, file] : file_of_) index["weight_map"][name] = file->path().filename().string();
    const std::string text = index.dump(2) + "\n";
    std::vector<fs::path> placed;
    try {
      for (const auto& file : files_) {
        file->put_in_place();
        placed.push_back(file->path());
      }
      if (fsync_) sync_folder(folder_);
      write_file(folder_ / kIndex, text);  // from its rename the new files count, whatever fails
    } catch (...) {
      std::error_code ignored;
      if (!holds(folder_ / kIndex, text)) {
        for (const fs::path& path : placed) fs::remove(path, ignored);
      }
      throw;
    }
    index_ = std::move(index);
    version_ = version;
    for (const SafetensorsFile& file : tensors_->files()) remove_unnamed(file.source());
    clean();
  }

  void drop() noexcept override {
    file_of_.clear();
    files_.clear();
  }

 private:
  void remove_unnamed(const fs::path& path) const {
    const std::string name = path.filename().string();
    for (const auto& file : index_["weight_map"]) {
      if (file == name) return;
    }
    std::error_code ignored;
    fs::remove(path, ignored);
  }

  // What killed receivers left: files aside, and shards that no index came to name.
  void clean() const {
    std::error_code ignored;
    std::vector<fs::path> wrecks, shards;
    for (const auto& entry : fs::directory_iterator(folder_, ignored)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(kPartial)) wrecks.push_back(entry.path());
      if (sharded_ && name.ends_with(".safetensors") && stem_of(name) != entry.path().stem().string())
        shards.push_back(entry.path());
    }
    for (const fs::path& path : wrecks) fs::remove(path, ignored);
    for (const fs::path& path : shards) remove_unnamed(path);
  }

  fs::path folder_;
  bool fsync_;
  bool sharded_ = false;
  Json index_;
  std::optional<int64_t> version_;
  std::unique_ptr<HfTensors> tensors_;
  std::map<std::string, TensorSpec> specs_;
  std::vector<std::unique_ptr<NewFile>> files_;
  std::map<std::string, NewFile*> file_of_;
};

}  // namespace

std::unique_ptr<ReceiveTarget> folder_target(const fs::path& folder, bool fsync) {
  return std::make_unique<FolderTarget>(folder, fsync);
}

}  // namespace titanium
