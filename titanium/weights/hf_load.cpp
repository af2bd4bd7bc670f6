#include "titanium/weights/hf_load.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "titanium/base/error.h"
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

// The tensor of the files that fills a weight; null where there is none and need not be.
const TensorView* source_of(const HfTensors& tensors, const Weight& weight, const ParamStore& store,
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
      return nullptr;
    throw BadCheckpoint("{}: tensor '{}'{} is missing; the model's config.json wants it with shape [{}]",
                        first_file(tensors), weight.name(), alias ? fmt::format(" (or '{}')", *alias) : "",
                        fmt::join(weight.shape(), ", "));
  }
  if (own != nullptr && other != nullptr &&
      (own->dtype != other->dtype || std::memcmp(own->data, other->data, own->nbytes) != 0)) {
    throw BadCheckpoint(
        "{}: '{}' and '{}' are one weight (tie_word_embeddings), but the files hold two that differ",
        file_of(tensors, *other), own->name, other->name);
  }
  return own != nullptr ? own : other;
}

}  // namespace

HfLoadReport load_hf(const HfTensors& tensors, ParamStore& store, const HfLoadOptions& options) {
  // All checks first: a checkpoint that cannot be used leaves the masters as they are.
  HfLoadReport report;
  std::set<std::string> used;
  std::set<Dtype> stored;
  std::vector<std::pair<const Weight*, const TensorView*>> sources;
  for (const auto& weight : store.table().weights()) {
    const TensorView* view = source_of(tensors, *weight, store, options, used);
    sources.emplace_back(weight.get(), view);
    if (view == nullptr) {
      report.missing.push_back(weight->name());
    } else {
      stored.insert(view->dtype);
    }
  }
  for (const std::string& tensor : tensors.names()) {
    if (used.count(tensor)) continue;
    const bool harmless = std::any_of(options.ignored_endings.begin(), options.ignored_endings.end(),
                                      [&](const std::string& ending) { return tensor.ends_with(ending); });
    if (!harmless) {
      const TensorView& view = tensors.at(tensor);
      throw BadCheckpoint(
          "{}: tensor '{}' of shape [{}] is unexpected: the model of config.json has no such weight",
          file_of(tensors, view), tensor, fmt::join(view.shape, ", "));
    }
    report.ignored.push_back(tensor);
  }
  report.stored.assign(stored.begin(), stored.end());

  struct Piece {
    const std::byte* from;
    Dtype stored;
    std::byte* to;
    Dtype master;
    int64_t count;
  };
  std::vector<Piece> pieces;
  std::set<Unit*> units;
  for (const Slice& slice : store.slices()) {
    const TensorView* view = std::find_if(sources.begin(), sources.end(), [&](const auto& s) {
                               return s.first == slice.weight;
                             })->second;
    if (view == nullptr) continue;
    const at::Tensor target = slice.of(slice.unit->shard());
    const Dtype master = to_dtype(target.scalar_type());
    auto* to = static_cast<std::byte*>(target.data_ptr());
    for (int64_t at = slice.begin; at < slice.end; at += kPiece) {
      pieces.push_back({view->data + at * size_of(view->dtype), view->dtype,
                        to + (at - slice.begin) * size_of(master), master, std::min(kPiece, slice.end - at)});
    }
    report.bytes += static_cast<uint64_t>((slice.end - slice.begin) * size_of(view->dtype));
    ++report.tensors;
    units.insert(slice.unit);
  }
  for (Unit* unit : units) store.before_write(*unit);
  at::parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Piece& p = pieces[i];
      if (p.stored == p.master) {
        std::memcpy(p.to, p.from, static_cast<size_t>(p.count * size_of(p.master)));
      } else {
        convert(p.from, p.stored, p.to, p.master, p.count);
      }
    }
  });
  for (Unit* unit : units) unit->written();
  return report;
}

HfLoadReport load_hf(const std::filesystem::path& folder, ParamStore& store, const HfLoadOptions& options) {
  return load_hf(HfTensors(folder), store, options);
}

}  // namespace titanium
