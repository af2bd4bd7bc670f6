#include "titanium/weights/hf_load.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/piece.h"
#include "titanium/weights/scalar_type.h"

namespace titanium {
namespace {

constexpr int64_t kPiece = 1 << 18;  // elements converted by one thread at a time

const std::string& file_of(const HfTensors& tensors, const TensorView& view) {
  for (const SafetensorsFile& file : tensors.files()) {
    if (file.find(view.name) != nullptr) return file.source();
  }
  throw Bug("tensor '{}' is in no file", view.name);
}

std::string first_file(const HfTensors& tensors) {
  return tensors.files().empty() ? "the checkpoint" : tensors.files().front().source();
}

// The name under which the files may hold a tied weight too; null where there is none.
const std::string* alias_of(const Weight& weight, const ParamStore& store, const HfLoadOptions& options) {
  if (!weight.shared()) return nullptr;
  for (const auto& [other, name] : options.aliases) {
    if (name == weight.name() && store.table().find(other) == nullptr) return &other;
  }
  return nullptr;
}

void check(const HfTensors& tensors, const TensorView& view, const Weight& weight) {
  if (view.shape != weight.shape()) {
    throw BadCheckpoint("{}: tensor '{}' has shape [{}], the model's config.json wants [{}]",
                        file_of(tensors, view), view.name, fmt::join(view.shape, ", "),
                        fmt::join(weight.shape(), ", "));
  }
  if (!is_floating(view.dtype)) {
    throw BadCheckpoint("{}: tensor '{}' has dtype {}: allowed for a weight: F32, BF16, F16, F64",
                        file_of(tensors, view), view.name, name(view.dtype));
  }
}

// The tensor of the files that fills a weight, and one of another name that must be the same; null where
// there is none and need not be.
struct Source {
  const TensorView *view = nullptr, *twin = nullptr;
};
Source source_of(const HfTensors& tensors, const Weight& weight, const ParamStore& store,
                 const HfLoadOptions& options, std::set<std::string>& used) {
  const TensorView* own = tensors.find(weight.name());
  for (const auto& [name, of] : options.other_names) {
    if (own == nullptr && of == weight.name()) own = tensors.find(name);
  }
  const std::string* alias = alias_of(weight, store, options);
  const TensorView* other = alias != nullptr ? tensors.find(*alias) : nullptr;
  for (const TensorView* view : {own, other}) {
    if (view == nullptr) continue;
    check(tensors, *view, weight);
    used.insert(view->name);
  }
  if (own == nullptr && other == nullptr) {
    if (std::find(options.optional.begin(), options.optional.end(), weight.name()) != options.optional.end())
      return {};
    throw BadCheckpoint("{}: tensor '{}'{} is missing; the model's config.json wants it with shape [{}]",
                        first_file(tensors), weight.name(), alias ? fmt::format(" (or '{}')", *alias) : "",
                        fmt::join(weight.shape(), ", "));
  }
  return own != nullptr ? Source{own, other} : Source{other, nullptr};
}

// `work` for every piece, by all threads.
void each_piece(const std::vector<Slice>& pieces, const std::function<void(size_t)>& work) {
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) work(static_cast<size_t>(i));
  });
}

class Loader {
 public:
  Loader(const HfTensors& tensors, ParamStore& store, const HfLoadOptions& options)
      : tensors_(tensors), store_(store), options_(options) {}

  void check_all() {
    store_.check_free();
    find_sources();
    refuse_unexpected();
    for (const Slice& slice : store_.slices()) {
      const Source& source = sources_.at(slice.weight);
      if (source.view == nullptr) continue;
      if (source.twin != nullptr) compare(slice, source);
      const std::vector<Slice> pieces = parts_of(slice, kPiece);
      pieces_.insert(pieces_.end(), pieces.begin(), pieces.end());
      report_.bytes += static_cast<uint64_t>(slice.count() * size_of(source.view->dtype));
    }
  }

  HfLoadReport write() {
    std::set<Unit*> units;  // of every rank, so also those of which this one owns nothing
    for (const auto& [weight, source] : sources_) {
      Unit* unit = weight->unit_here();
      if (source.view != nullptr && unit != nullptr && units.insert(unit).second) store_.before_write(*unit);
    }
    each_piece(pieces_, [&](size_t i) { fill(pieces_[i]); });
    for (Unit* unit : units) unit->written();
    return std::move(report_);
  }

 private:
  void find_sources() {
    std::set<Dtype> stored;
    for (const auto& weight : store_.table().weights()) {
      const Source source = source_of(tensors_, *weight, store_, options_, used_);
      sources_[weight.get()] = source;
      if (source.view == nullptr) {
        report_.missing.push_back(weight->name());
        continue;
      }
      stored.insert(source.view->dtype);
      ++report_.tensors;
    }
    report_.stored.assign(stored.begin(), stored.end());
  }

  void refuse_unexpected() {
    for (const std::string& tensor : tensors_.names()) {
      if (used_.count(tensor)) continue;
      const bool harmless = std::any_of(options_.ignored_endings.begin(), options_.ignored_endings.end(),
                                        [&](const std::string& ending) { return tensor.ends_with(ending); });
      if (!harmless) {
        const TensorView& view = tensors_.at(tensor);
        throw BadCheckpoint(
            "{}: tensor '{}' of shape [{}] is unexpected: the model of config.json has no such weight",
            file_of(tensors_, view), tensor, fmt::join(view.shape, ", "));
      }
      report_.ignored.push_back(tensor);
    }
  }

  // This rank's part of both: the others compare theirs.
  void compare(const Slice& slice, const Source& source) {
    const auto& [own, other] = source;
    const int64_t width = size_of(own->dtype);
    std::atomic<bool> differ = own->dtype != other->dtype;
    const std::vector<Slice> pieces = parts_of(slice, kPiece);
    each_piece(pieces, [&](size_t i) {
      pieces[i].each_run([&](const Slice::Run& run) {
        if (differ) return;
        const int64_t at = run.global * width, bytes = run.count * width;
        if (std::memcmp(own->data + at, other->data + at, static_cast<size_t>(bytes)) != 0) differ = true;
      });
    });
    if (differ) {
      throw BadCheckpoint(
          "{}: '{}' and '{}' are one weight (tie_word_embeddings), but the files hold two that differ",
          file_of(tensors_, *other), own->name, other->name);
    }
    report_.bytes += static_cast<uint64_t>(slice.count() * width);
  }

  void fill(const Slice& piece) const {
    const TensorView& view = *sources_.at(piece.weight).view;
    const at::Tensor target = piece.of(piece.unit->shard());
    const Dtype master = to_dtype(target.scalar_type());
    auto* to = static_cast<std::byte*>(target.data_ptr());
    piece.each_run([&](const Slice::Run& run) {
      const std::byte* from = view.data + run.global * size_of(view.dtype);
      std::byte* at = to + run.begin * size_of(master);
      if (view.dtype == master) {
        std::memcpy(at, from, static_cast<size_t>(run.count * size_of(master)));
      } else {
        convert(from, view.dtype, at, master, run.count);
      }
    });
  }

  const HfTensors& tensors_;
  ParamStore& store_;
  const HfLoadOptions& options_;
  std::map<const Weight*, Source> sources_;
  std::set<std::string> used_;  // tensors of the files
  std::vector<Slice> pieces_;
  HfLoadReport report_;
};

// A line for each tensor, with a hash of its first bytes: ranks read parts of the same files.
std::string description(const HfTensors& tensors) {
  std::string text;
  for (const std::string& tensor : tensors.names()) {
    const TensorView& view = tensors.at(tensor);
    const uint64_t begin = Hash64::of({view.data, std::min<size_t>(view.nbytes, 256)});
    text += fmt::format("{} {} [{}], begins {}\n", tensor, name(view.dtype), fmt::join(view.shape, ", "),
                        to_hex(begin));
  }
  return text;
}

}  // namespace

HfLoadReport load_hf(const HfTensors& tensors, ParamStore& store, const HfLoadOptions& options) {
  Loader loader(tensors, store, options);
  const Group& ranks = store.mesh().all();
  agree(ranks, [&] { loader.check_all(); });
  if (ranks.size() > 1) agree_on(ranks, "the content of the model's files", description(tensors));
  return loader.write();
}

HfLoadReport load_hf(const std::filesystem::path& folder, ParamStore& store, const HfLoadOptions& options) {
  std::optional<HfTensors> tensors;
  agree(store.mesh().all(), [&] { tensors.emplace(folder); });
  return load_hf(*tensors, store, options);
}

}  // namespace titanium
