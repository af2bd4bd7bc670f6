// For the tests of this room: a small model and a training whose gradients are a function of (weight, step),
// so that two runs can be compared bitwise.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "titanium/base/random.h"
#include "titanium/optim/clip.h"
#include "titanium/optim/optimizer.h"
#include "titanium/weights/hash.h"

namespace titanium::testing {

struct ToyOptions {
  StoreDtypes dtypes = {};
  OptimizerOptions optimizer = {};
  bool freeze = false;     // the weight "fixed" does not train
  bool one_block = false;  // another cut into units
  uint64_t seed = 1;
  int64_t width = 40;
};

class ToyRun {
 public:
  explicit ToyRun(const ToyOptions& options = {}) {
    const auto block = [&](int b) { return options.one_block ? 0 : b; };
    const int64_t w = options.width;
    const Weight* embed = table.add("model.embed_tokens.weight", {50, w}, Split::kRows, {}, 0);
    table.add("a.weight", {w, w}, Split::kRows, {}, block(1));
    table.add("a.bias", {w}, Split::kWhole, {Init::kZeros}, block(1));
    table.add("fixed", {3, 5, 7}, Split::kWhole, {}, block(1));
    table.add("norm.weight", {w}, Split::kWhole, {Init::kOnes}, block(2));
    if (!options.one_block) table.share(embed, 2);
    StoreOptions store_options;
    store_options.dtypes = options.dtypes;
    if (options.freeze) store_options.frozen = [](const std::string& name) { return name == "fixed"; };
    store = std::make_unique<ParamStore>(table, options.one_block ? 1 : 3, store_options);
    store->init(options.seed);
    optimizer = make_optimizer(*store, options.optimizer);
  }

  void step(int64_t step) {
    store->zero_grad();
    for (const auto& w : table.weights()) {
      if (!w->trainable()) continue;
      const Random random(static_cast<uint64_t>(step), Purpose::kTest,
                          hash_name(w->name().data(), w->name().size()));
      std::vector<double> noise(w->numel());
      for (int64_t i = 0; i < w->numel(); ++i) noise[i] = random.normal(i);
      at::Tensor grad = w->unit().grad_view(w->offset(), {w->numel()});
      grad.copy_(at::from_blob(noise.data(), {w->numel()}, at::kDouble));
      grad.add_(param(w->name()).to(grad.scalar_type()));
    }
    const GradNorm norm = grad_norm(*store);
    optimizer->step({.lr = 0.01, .clip = clip_coefficient(norm.value, 1.0)});
  }

  at::Tensor param(const std::string& name) const {
    const Weight& w = store->weight(name);
    return w.unit().shard().narrow(0, w.offset(), w.numel());
  }

  // Of masters, state and the count of updates; absent state counts as zeros.
  std::string fingerprint() const {
    Hash64 hash;
    const auto add = [&](const at::Tensor& t) {
      hash.add({static_cast<const std::byte*>(t.const_data_ptr()), static_cast<size_t>(t.nbytes())});
    };
    for (const auto& w : table.weights()) {
      add(param(w->name()));
      for (const std::string& name : optimizer->state_names()) {
        const at::Tensor state = optimizer->state(w->unit(), name);
        const at::Tensor zeros =
            at::zeros({w->numel()}, at::TensorOptions().dtype(optimizer->state_dtype(w->unit())));
        add(state.defined() ? state.narrow(0, w->offset(), w->numel()) : zeros);
      }
    }
    return to_hex(hash.value()) + "-" + std::to_string(optimizer->updates());
  }

  WeightTable table;
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<Optimizer> optimizer;
};

}  // namespace titanium::testing
