// Optimizers: from gradients in the units' shards to new masters.  Elementwise over flat ranges, so the
// result depends neither on the number of threads nor on how units are cut over ranks.
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "titanium/shard/param_store.h"

namespace titanium {

struct OptimizerOptions {
  std::string name = "AdamW";  // or "SGD"
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0;                 // SGD
  bool decay_norms_and_biases = true;  // false: weights of one dimension are not decayed
  at::ScalarType state_dtype =
      at::kFloat;  // or kBFloat16; masters in fp64 have fp64 state whatever this says
};

struct UpdateOptions {
  double lr = 0;           // of this update
  double clip = 1;         // multiplied into every gradient (clip.h)
  bool zero_grad = false;  // leave zeroed gradients behind, in the same pass over memory
};

// State is kept by (unit, name): a flat tensor as long as the unit's shard.  It is made, zeroed, when a unit
// with a gradient is updated for the first time; until then it is absent, which means zeros.
class Optimizer {
 public:
  // BadConfig names the option that is out of range.
  Optimizer(ParamStore& store, OptimizerOptions options);
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  virtual std::string name() const = 0;
  virtual std::vector<std::string> state_names() const = 0;  // the same for every unit

  // One update of every unit that has a gradient.  Calls store.before_write(unit) before a unit's masters and
  // state are touched, unit.written() after.
  void step(const UpdateOptions& update);

  // Other hyperparameters from the next step on: the betas, eps, weight decay and the momentum's size.
  // BadConfig names the option that is out of range, or one that state depends on (name, state_dtype, whether
  // there is momentum).
  void set_options(const OptimizerOptions& options);
  const OptimizerOptions& options() const { return options_; }

  int64_t updates() const { return updates_; }  // t of the bias corrections; part of a checkpoint
  void set_updates(int64_t updates) { updates_ = updates; }

  at::Tensor state(const Unit& unit, const std::string& name) const;  // undefined when absent
  at::Tensor make_state(const Unit& unit, const std::string& name);   // zeros where it was absent
  void drop_state(const Unit& unit);                                  // back to absent, i.e. zeros
  at::ScalarType state_dtype(const Unit& unit) const;
  uint64_t bytes() const;          // of all state that is there
  uint64_t bytes_planned() const;  // of all state once every trainable unit has been updated

  const ParamStore& store() const { return store_; }

 protected:
  // A run of the unit's shard with one weight decay.
  struct Range {
    int64_t begin, end;
    double weight_decay;
  };
  // `cast`, where it is defined, gets the new masters in bf16 as well.
  virtual void update(Unit& unit, const at::Tensor& cast, const std::vector<Range>& ranges,
                      const UpdateOptions& update) = 0;

 private:
  const std::vector<Range>& ranges_of(const Unit& unit);

  ParamStore& store_;
  OptimizerOptions options_;
  int64_t updates_ = 0;
  std::map<const Unit*, std::map<std::string, at::Tensor>> state_;
  std::map<const Unit*, std::vector<Range>> ranges_;
};

// Decoupled weight decay (Loshchilov, Hutter, 2019), as torch.optim.AdamW:
//   g = clip grad;  p *= 1 - lr wd;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  p -= lr (m/(1-b1^t)) /
//   (sqrt(v/(1-b2^t)) + eps)
// State "exp_avg" (m), "exp_avg_sq" (v).  Masters or state in bf16 are widened to fp32, updated there and
// rounded to nearest even once: an update below half a unit in the last place of a bf16 master (about 0.2 %
// of it) is lost, and a bf16 v stops following once (1-b2) (g^2 - v) is below the same part of it.  fp32
// masters lose nothing of the kind.
class AdamW final : public Optimizer {
 public:
  using Optimizer::Optimizer;
  std::string name() const override { return "AdamW"; }
  std::vector<std::string> state_names() const override { return {"exp_avg", "exp_avg_sq"}; }

 protected:
  void update(Unit& unit, const at::Tensor& cast, const std::vector<Range>& ranges,
              const UpdateOptions& update) override;
};

// As torch.optim.SGD (dampening 0, no Nesterov): g = clip grad + wd p;  buf = momentum buf + g;  p -= lr buf.
// State "momentum_buffer", none where momentum is 0.
class SGD final : public Optimizer {
 public:
  using Optimizer::Optimizer;
  std::string name() const override { return "SGD"; }
  std::vector<std::string> state_names() const override {
    return options().momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
  }

 protected:
  void update(Unit& unit, const at::Tensor& cast, const std::vector<Range>& ranges,
              const UpdateOptions& update) override;
};

// BadConfig lists the names that are known.
std::unique_ptr<Optimizer> make_optimizer(ParamStore& store, const OptimizerOptions& options);

// The optimizers of a run, one now: the noun of torchtitan.
class OptimizersContainer {
 public:
  OptimizersContainer(ParamStore& store, const OptimizerOptions& options) : store_(store) {
    optimizers_.push_back(make_optimizer(store, options));
  }
  void step(const UpdateOptions& update) {
    for (const auto& optimizer : optimizers_) optimizer->step(update);
  }
  void zero_grad() { store_.zero_grad(); }
  const std::vector<std::unique_ptr<Optimizer>>& optimizers() const { return optimizers_; }
  Optimizer& only() const { return *optimizers_.front(); }

 private:
  ParamStore& store_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
};

}  // namespace titanium
