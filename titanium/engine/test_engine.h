// Engines over the small fixture models, for tests.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "titanium/base/random.h"
#include "titanium/engine/titan_engine.h"
#include "titanium/loss/external.h"
#include "titanium/loss/sft.h"

namespace titanium {

inline std::string model_folder(const std::string& name) {
  return fmt::format("{}/tests/data/models/{}", TITANIUM_SOURCE_DIR, name);
}

template <typename E, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const E& e) {
    return e.what();
  }
  return "no exception of the kind";
}

// A folder that is removed with the object.
struct TestFolder {
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "titanium_engine_XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::filesystem::path path;
};

inline Json engine_json(const std::string& model, const std::string& dtype = "float32") {
  return {{"model", {{"path", model_folder(model)}}},
          {"engine", {{"dtype", dtype}, {"max_token_len_per_gpu", 64}}},
          {"optimizer", {{"lr", 1e-3}}}};
}

// An engine and the lines that it logged.
struct TestEngine {
  explicit TestEngine(const Json& json, const std::string& model_type = "language_model",
                      bool initialize = true, std::shared_ptr<World> world = nullptr)
      : log(options()),
        engine(EngineRegistry().create(model_type, "titanium", "cpu", EngineConfig::from_json(json), log,
                                       std::move(world))) {
    if (initialize) engine->initialize();
  }
  TitanEngine* operator->() const { return static_cast<TitanEngine*>(engine.get()); }
  TitanEngine& operator*() const { return static_cast<TitanEngine&>(*engine); }
  bool logged(const std::string& text) const {
    for (const std::string& line : lines)
      if (line.find(text) != std::string::npos) return true;
    return false;
  }

  std::vector<std::string> lines;
  Log log;
  std::unique_ptr<BaseEngine> engine;

 private:
  LogOptions options() {
    LogOptions o;
    o.timestamps = false;
    o.sink = [this](std::string_view line) { lines.emplace_back(line); };
    return o;
  }
};

// Samples of the given lengths, ids drawn from [0, vocabulary), trained from `prompt` on.
inline std::vector<Sample> test_samples(const std::vector<int64_t>& lengths, uint64_t seed = 1,
                                        int64_t vocabulary = 60, int64_t prompt = 2) {
  std::vector<Sample> samples;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const Random random(seed, Purpose::kTest, i);
    Sample sample;
    for (int64_t t = 0; t < lengths[i]; ++t) {
      sample.ids.push_back(
          static_cast<int32_t>(random.below(static_cast<uint64_t>(t), static_cast<uint64_t>(vocabulary))));
      sample.loss_mask.push_back(t >= prompt ? 1 : 0);
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

inline EngineBatch test_batch(std::vector<Sample> samples) {
  EngineBatch batch;
  batch.samples = std::move(samples);
  return batch;
}

inline double total(const EngineOutput& output) {
  double sum = 0;
  for (const double loss : output.loss) sum += loss;
  return sum;
}

// All gradients, or all masters, one after the other.
inline at::Tensor all_gradients(const TitanEngine& engine) {
  std::vector<at::Tensor> all;
  for (const auto& unit : engine.session().store->units()) {
    const at::Tensor grad = unit->grad_shard();
    all.push_back((grad.defined() ? grad : at::zeros_like(unit->shard())).to(at::kDouble));
  }
  return at::cat(all);
}
inline at::Tensor all_masters(const TitanEngine& engine) {
  std::vector<at::Tensor> all;
  for (const auto& unit : engine.session().store->units()) all.push_back(unit->shard().to(at::kDouble));
  return at::cat(all);
}

}  // namespace titanium
