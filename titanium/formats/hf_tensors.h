// The weights of a Hugging Face folder: model.safetensors, or shards with model.safetensors.index.json.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/formats/safetensors.h"

namespace titanium {

// Opens every file and compares the index with what the files hold: a tensor that is missing, unexpected or
// in two files is a BadCheckpoint that names it.  Where both forms are present model.safetensors is taken, as
// transformers does.  Shard names with a folder in them are refused.
class HfTensors {
 public:
  explicit HfTensors(const std::filesystem::path& folder);

  const std::vector<SafetensorsFile>& files() const { return files_; }
  std::vector<std::string> names() const;  // sorted
  size_t size() const { return tensors_.size(); }
  const TensorView* find(std::string_view name) const;  // nullptr when absent
  const TensorView& at(std::string_view name) const;    // BadCheckpoint when absent
  uint64_t total_bytes() const;                         // of all tensors

 private:
  void add_file(const std::filesystem::path& path);

  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::pair<size_t, size_t>, std::less<>> tensors_;  // name -> file, tensor in it
};

// A tensor that is made when its turn comes: `produce` calls the sink with its bytes, in order, in any
// pieces.
using ByteSink = std::function<void(std::span<const std::byte>)>;
struct TensorSource {
  TensorSpec spec;
  std::function<void(const ByteSink& sink)> produce;
};

struct HfWriteOptions {
  uint64_t max_shard_bytes = uint64_t{5} * 1000 * 1000 * 1000;  // a tensor above this gets a shard of its own
  Metadata metadata = {{"format", "pt"}};  // transformers refuses a file without "format"
  bool fsync = true;
};

// How tensors are laid out in files: one model.safetensors, or model-00001-of-0000N.safetensors... and an
// index. Tensors go to shards in the order given; within one, wider dtypes lie first, so that every tensor is
// aligned.
struct HfFile {
  std::string name;
  std::vector<size_t> tensors;  // of the given ones, in the order of their bytes
};
// BadCheckpoint for two tensors of one name.
std::vector<HfFile> lay_out_hf_files(std::span<const TensorSpec> specs, uint64_t max_shard_bytes);
// model.safetensors.index.json, where there are several files.
void write_hf_index(const std::filesystem::path& folder, std::span<const TensorSpec> specs,
                    std::span<const HfFile> files);

// Writes those files, and the index (whose weight_map is exactly the tensors in the files, and whose
// total_size is the sum of their bytes).  BadCheckpoint: the folder holds weights already, two tensors of one
// name, a source that gives another number of bytes than its spec, a disk error.
void write_hf_tensors(const std::filesystem::path& folder, std::span<const TensorSource> sources,
                      const HfWriteOptions& options = {});

}  // namespace titanium
