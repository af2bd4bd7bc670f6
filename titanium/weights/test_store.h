// For the tests of files and of weight sync: stores of the weights of a folder, or of a list.
#pragma once
#include <ATen/ATen.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "titanium/formats/json.h"
#include "titanium/weights/hf_load.h"

namespace titanium::testing {

inline const std::filesystem::path kModels = TITANIUM_SOURCE_DIR "/tests/data/models";

inline std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), static_cast<size_t>(tensor.nbytes())};
}

// A table of weights and the store of them.
struct TestStore {
  at::Tensor param(const std::string& name) const {
    const Weight& w = store->weight(name);
    return w.unit().shard().narrow(0, w.offset(), w.numel());
  }
  WeightTable table;
  std::unique_ptr<ParamStore> store;
};

inline bool is_tied(const std::filesystem::path& folder) {
  return read_json(folder / "config.json").at("tie_word_embeddings").get<bool>();
}

// The weights of a model's files; a tied head is no weight of its own.
struct ModelStore : TestStore {
  // As the folder's files have them; `compute` is the masters' dtype unless it is given.
  explicit ModelStore(const std::filesystem::path& folder, at::ScalarType dtype = at::kFloat,
                      std::optional<at::ScalarType> compute = {})
      : ModelStore(HfTensors(folder), is_tied(folder), dtype, compute) {
    load_hf(folder, *store);
  }
  // Of their names and shapes, not read yet.
  ModelStore(const HfTensors& tensors, bool tied, at::ScalarType dtype = at::kFloat,
             std::optional<at::ScalarType> compute = {}) {
    const Weight* embed = nullptr;
    for (const std::string& name : tensors.names()) {
      if (tied && name == "lm_head.weight") continue;
      const Weight* weight = table.add(name, tensors.at(name).shape, Split::kWhole, {}, 0);
      if (name == "model.embed_tokens.weight") embed = weight;
    }
    if (tied) table.share(embed, 1);
    StoreOptions options;
    options.dtypes = {dtype, compute.value_or(dtype), dtype == at::kDouble ? at::kDouble : at::kFloat};
    store = std::make_unique<ParamStore>(table, 2, options);
  }
};

struct StoreOf : TestStore {
  explicit StoreOf(const std::vector<std::pair<std::string, std::vector<int64_t>>>& weights) {
    for (const auto& [name, shape] : weights) table.add(name, shape, Split::kWhole, {}, 0);
    store = std::make_unique<ParamStore>(table, 1, StoreOptions{});
    float* data = store->unit(0).shard().data_ptr<float>();
    const int64_t n = store->unit(0).shard().numel();
    for (int64_t i = 0; i < n; ++i) data[i] = static_cast<float>(i * 2654435761u % 1000003) * 1e-5f - 3;
  }
};

}  // namespace titanium::testing
