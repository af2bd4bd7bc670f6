// Engines on many ranks, as threads of the test.
#pragma once
#include <cmath>
#include <functional>
#include <map>
#include <mutex>

#include "titanium/dist/run_ranks.h"
#include "titanium/engine/test_engine.h"

namespace titanium {

struct Layout {
  std::string name;
  int replicate = 1, shard = 1, tp = 1, pp = 1;
  std::string schedule = "1F1B";
  int data() const { return replicate * shard; }
  int ranks() const { return pp * data() * tp; }
};
inline void PrintTo(const Layout& layout, std::ostream* out) {
  *out << layout.name;
}

inline Json on_layout(Json json, const Layout& layout) {
  json["engine"]["data_parallel_replicate_size"] = layout.replicate;
  json["engine"]["data_parallel_shard_size"] = layout.shard;
  json["engine"]["tensor_parallel_size"] = layout.tp;
  json["engine"]["pipeline_parallel_size"] = layout.pp;
  json["engine"]["pipeline_parallel_schedule"] = layout.schedule;
  return json;
}

// One rank's engine, and what a test asks of it.
struct RankEngine : TestEngine {
  RankEngine(const Json& json, const Layout& layout, const std::shared_ptr<World>& world,
             const std::string& model_type = "language_model")
      : TestEngine(on_layout(json, layout), model_type, /*initialize=*/true, world), rank(world->rank()) {}

  // This data rank's part of a global batch: consecutive samples, as many on each.
  std::vector<Sample> share(const std::vector<Sample>& all) const {
    const size_t each = all.size() / engine->get_data_parallel_size();
    const auto begin = all.begin() + static_cast<ptrdiff_t>(each) * engine->get_data_parallel_rank();
    return {begin, begin + static_cast<ptrdiff_t>(each)};
  }
  bool is_source() const { return engine->is_mp_src_rank_with_outputs(); }

  int rank;
};

inline void on_ranks(const Json& json, const Layout& layout, const std::function<void(RankEngine&)>& work,
                     const std::string& model_type = "language_model") {
  run_ranks(layout.ranks(), [&](std::shared_ptr<World> world) {
    RankEngine engine(json, layout, world, model_type);
    work(engine);
  });
}

// Whole tensors by name, put together by the ranks that own their parts; an element that nobody owns is nan.
class Whole {
 public:
  void add_masters(const TitanEngine& engine) {
    add(engine, [](Unit& unit) { return unit.shard(); });
  }
  void add_gradients(const TitanEngine& engine) {
    add(engine, [](Unit& unit) {
      return unit.grad_shard().defined() ? unit.grad_shard() : at::zeros_like(unit.shard());
    });
  }
  // The largest difference of any element; nan where one of the two lacks a part.
  double difference(const Whole& other) const {
    EXPECT_EQ(tensors_.size(), other.tensors_.size());
    double most = 0;
    for (const auto& [name, tensor] : tensors_) {
      const double one = (tensor - other.tensors_.at(name)).abs().max().item<double>();
      if (!(one <= most)) most = one;
    }
    return most;
  }
  double norm() const {
    double square = 0;
    for (const auto& [name, tensor] : tensors_) square += tensor.square().sum().item<double>();
    return std::sqrt(square);
  }

 private:
  void add(const TitanEngine& engine, const std::function<at::Tensor(Unit&)>& flat) {
    const std::lock_guard lock(mutex_);
    const ParamStore& store = *engine.session().store;
    for (const auto& weight : store.table().weights()) {
      const auto [entry, is_new] = tensors_.try_emplace(weight->name());
      if (is_new) entry->second = at::full({weight->numel()}, std::nan(""), at::kDouble);
    }
    for (const Slice& slice : store.slices()) {
      const at::Tensor own = slice.of(flat(*slice.unit)).to(at::kDouble);
      slice.each_run([&](const Slice::Run& run) {
        tensors_.at(slice.weight->name())
            .narrow(0, run.global, run.count)
            .copy_(own.narrow(0, run.begin, run.count));
      });
    }
  }

  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
};

}  // namespace titanium
