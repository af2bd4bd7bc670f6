#include "titanium/formats/gguf_to_hf.h"

#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/formats/gguf.h"
#include "titanium/formats/gguf_config.h"
#include "titanium/formats/gguf_tokenizer.h"
#include "titanium/formats/hf_tensors.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kPiece = 1 << 20;  // elements held in memory at a time, or one row if that is longer

// llama.cpp stores the two halves of a head interleaved: row (half j, i) of a head lies at 2 i + j.
int64_t interleaved_row(int64_t row, int64_t head_rows) {
  const int64_t head = row / head_rows, in_head = row % head_rows;
  const int64_t half = in_head / (head_rows / 2), i = in_head % (head_rows / 2);
  return head * head_rows + 2 * i + half;
}

void produce(const TensorMove& move, Dtype dtype, const ByteSink& sink) {
  const GgufTensor& from = *move.from;
  const bool vector = from.shape.size() < 2;  // a bias: its "rows" are its elements
  std::vector<float> whole;
  if (vector && move.heads != 0) {
    whole.resize(static_cast<size_t>(from.columns()));
    from.dequantize(0, 1, whole.data());
  }
  const bool gather = !whole.empty();
  const int64_t columns = gather ? 1 : from.columns();
  const int64_t rows = gather ? from.columns() : from.rows();
  const int64_t step = std::max<int64_t>(1, kPiece / columns);
  const int64_t head_rows = move.heads == 0 ? 0 : rows / move.heads;
  std::vector<float> values(static_cast<size_t>(std::min(step, rows) * columns));
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(size_of(dtype)));

  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t end = std::min(begin + step, rows);
    if (move.heads == 0) {
      from.dequantize(begin, end, values.data());
    } else {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t source = interleaved_row(row, head_rows);
        float* out = values.data() + (row - begin) * columns;
        if (gather) {
          *out = whole[static_cast<size_t>(source)];
        } else {
          from.dequantize(source, source + 1, out);
        }
      }
    }
    const int64_t count = (end - begin) * columns;
    convert(reinterpret_cast<const std::byte*>(values.data()), Dtype::F32, bytes.data(), dtype, count);
    sink({bytes.data(), static_cast<size_t>(count * size_of(dtype))});
  }
}

// A folder under a temporary name beside its final one; gone again unless it is put in place.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& target) {
    target_ = fs::absolute(target).lexically_normal();
    if (!target_.has_filename()) target_ = target_.parent_path();
    refuse_content();
    std::error_code error;
    fs::create_directories(target_.parent_path(), error);
    partial_ = target_.parent_path() / fmt::format(".{}.partial-{}", target_.filename().string(), ::getpid());
    fs::remove_all(partial_, error);
    if (!fs::create_directory(partial_, error)) {
      const auto failed = std::exchange(partial_, fs::path());
      throw BadConfig("{}: cannot be created: {}", failed.string(), error.message());
    }
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!partial_.empty()) fs::remove_all(partial_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const fs::path& path() const { return partial_; }

  void put_in_place() {
    refuse_content();
    std::error_code error;
    fs::rename(partial_, target_, error);
    if (error) throw BadConfig("{}: cannot be put in place: {}", target_.string(), error.message());
    partial_.clear();
    sync_folder(target_.parent_path());
  }

 private:
  void refuse_content() const {
    std::error_code error;
    if (!fs::exists(target_, error)) return;
    if (!fs::is_directory(target_, error))
      throw BadConfig("{}: is there already and not a folder", target_.string());
    if (!fs::is_empty(target_, error)) {
      throw BadConfig("{}: holds files already; choose a new or an empty folder", target_.string());
    }
  }

  fs::path target_, partial_;
};

}  // namespace

ConvertReport convert_gguf(const fs::path& gguf, const fs::path& out_dir, const ConvertOptions& options) {
  if (options.dtype != Dtype::BF16 && options.dtype != Dtype::F32) {
    throw BadConfig("dtype {} cannot be written (allowed: bfloat16, float32)", torch_name(options.dtype));
  }
  const GgufFile file(gguf);
  GgufModel model = describe_gguf(file);
  const HfTokenizer tokenizer = describe_tokenizer(file, model.vocab_size, model.context_length);
  model.config["torch_dtype"] = torch_name(options.dtype);

  ConvertReport report;
  std::vector<TensorSource> sources;
  for (const TensorMove& move : model.moves) {
    TensorSource source;
    source.spec = {move.name, options.dtype, move.from->shape};
    source.produce = [&move, &options](const ByteSink& sink) { produce(move, options.dtype, sink); };
    report.bytes += source.spec.nbytes();
    sources.push_back(std::move(source));
  }
  report.tensors = static_cast<int64_t>(sources.size());

  NewFolder folder(out_dir);
  HfWriteOptions write;
  write.max_shard_bytes = options.max_shard_bytes;
  write_hf_tensors(folder.path(), sources, write);
  write_file(folder.path() / "config.json", model.config.dump(2) + "\n");
  write_file(folder.path() / "generation_config.json", model.generation_config.dump(2) + "\n");
  write_file(folder.path() / "tokenizer.json", tokenizer.tokenizer_json);
  write_file(folder.path() / "tokenizer_config.json", tokenizer.tokenizer_config.dump(2) + "\n");
  folder.put_in_place();
  return report;
}

}  // namespace titanium
