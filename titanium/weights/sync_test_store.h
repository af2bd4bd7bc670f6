// For the tests of weight sync: stores with the weights of a folder, or of a list.
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

struct ModelStore {
  explicit ModelStore(const std::filesystem::path& folder, at::ScalarType dtype = at::kFloat,
                      std::optional<at::ScalarType> compute = {}) {
    const HfTensors tensors(folder);
    const bool tied = read_json(folder / "config.json").at("tie_word_embeddings").get<bool>();
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
    load_hf(tensors, *store);
  }
  at::Tensor param(const std::string& name) const {
    const Weight& w = store->weight(name);
    return w.unit().shard().narrow(0, w.offset(), w.numel());
  }
  WeightTable table;
  std::unique_ptr<ParamStore> store;
};

struct StoreOf {
  explicit StoreOf(const std::vector<std::pair<std::string, std::vector<int64_t>>>& weights) {
    for (const auto& [name, shape] : weights) table.add(name, shape, Split::kWhole, {}, 0);
    store = std::make_unique<ParamStore>(table, 1, StoreOptions{});
    float* data = store->unit(0).shard().data_ptr<float>();
    const int64_t n = store->unit(0).shard().numel();
    for (int64_t i = 0; i < n; ++i) data[i] = static_cast<float>(i * 2654435761u % 1000003) * 1e-5f - 3;
  }
  at::Tensor param(const std::string& name) const {
    const Weight& w = store->weight(name);
    return w.unit().shard().narrow(0, w.offset(), w.numel());
  }
  WeightTable table;
  std::unique_ptr<ParamStore> store;
};

}  // namespace titanium::testing
