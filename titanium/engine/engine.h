// The engine that an RL trainer drives: verl's BaseEngine in C++.
//
//   auto engine = EngineRegistry().create("language_model", "titanium", "cpu", config, log);
//   engine->initialize();
//   {
//     auto scope = engine->train_mode();
//     EngineOutput out = engine->train_batch(batch, loss);
//   }
//   engine->lr_scheduler_step();
//
// One object is one rank of one engine.  Calls come from one thread, and all ranks make the same calls in the
// same order; the ranks of a tensor-parallel group give the same batches and get the same outputs, those of
// other data ranks theirs. What is refused on one rank is refused on all, by the same error.  After an
// exception of kind BadConfig, BadData or BadCheckpoint, or of the caller's own loss, the engine is usable: a
// forward_backward_batch that throws leaves zeroed gradients behind, and so does a mode scope that an
// exception leaves.
#pragma once
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "titanium/dist/group.h"
#include "titanium/dist/world.h"
#include "titanium/engine/batch.h"
#include "titanium/engine/engine_config.h"
#include "titanium/report/log.h"
#include "titanium/weights/sync.h"

namespace titanium {

enum class Mode { kNone, kTrain, kEval };
const char* name(Mode mode);  // "none", "train", "eval"

struct ModeOptions {
  bool disable_auto_offload = false;  // leave the state where it is, on entry and on exit
  bool zero_grad_on_exit = true;      // train only
};

// A group of parameters with its hyperparameters: what is written here holds from the next optimizer_step()
// on. lr_scheduler_step() writes lr.
struct ParamGroup {
  double lr = 0;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  bool operator==(const ParamGroup&) const = default;
};

class BaseEngine;

// A mode for as long as it lives.  Scopes nest, and end in the reverse order.
class ModeScope {
 public:
  ModeScope(BaseEngine& engine, Mode mode, ModeOptions options);
  ~ModeScope();
  ModeScope(const ModeScope&) = delete;
  ModeScope& operator=(const ModeScope&) = delete;

 private:
  BaseEngine& engine_;
  int exceptions_;
};

class BaseEngine {
 public:
  virtual ~BaseEngine() = default;

  // Before initialize(), which is when the LR schedule is made; BadConfig after it.
  virtual void set_total_training_steps(int64_t steps) = 0;
  // Reads the weights, makes optimizer and schedule (neither for a forward_only engine).  Once.
  virtual void initialize() = 0;

  virtual bool is_param_offload_enabled() const = 0;
  virtual bool is_optimizer_offload_enabled() const = 0;

  ModeScope train_mode(ModeOptions options = {}) { return ModeScope(*this, Mode::kTrain, options); }
  ModeScope eval_mode(ModeOptions options = {}) { return ModeScope(*this, Mode::kEval, options); }
  // What the scopes call; for callers whose scopes are elsewhere (another process).  With offload on, the
  // outermost scope without disable_auto_offload loads on entry and offloads on exit; a train scope zeroes
  // the gradients on exit when its options say so or when it has failed.  exit_mode without a scope is a Bug;
  // it throws nothing else.
  virtual void enter_mode(Mode mode, ModeOptions options) = 0;
  virtual void exit_mode(bool failed) = 0;
  virtual Mode mode() const = 0;  // of the innermost scope

  virtual void optimizer_zero_grad() = 0;
  // Clips and updates; gradients stay until they are zeroed.  Returns the global norm before clipping.  When
  // that is not finite the update is skipped, the gradients are zeroed and a warning names the first bad
  // parameters.  Without a backward since the last zeroing there is nothing to do: 0.  BadConfig for a
  // forward_only engine.
  virtual double optimizer_step() = 0;
  virtual double lr_scheduler_step() = 0;               // the rate of the next update
  virtual std::vector<ParamGroup>& param_groups() = 0;  // one group now

  // Forward of the whole batch and, unless forward_only, backward, which adds into the gradients: several
  // calls accumulate.  Without a loss forward_only must be true (BadConfig).  A batch without samples gives
  // empty outputs. BadData for a sample that does not fit: empty, a token id outside the vocabulary, over the
  // token budget (with its length, the budget and the key).
  virtual EngineOutput forward_backward_batch(const EngineBatch& batch, const Loss* loss,
                                              bool forward_only) = 0;
  // All samples in one micro-batch, forward alone.
  EngineOutput forward_step(EngineBatch batch, const Loss* loss = nullptr);
  // Zero, forward and backward, update.  Adds the metric "grad_norm".  Leaves zeroed gradients.
  virtual EngineOutput train_batch(const EngineBatch& batch, const Loss& loss);
  EngineOutput infer_batch(const EngineBatch& batch, const Loss* loss = nullptr);

  // Full tensors under their Hugging Face names; see weights/sync.h.  The second value is the description of
  // an adapter, when the stream holds one.  Works outside of scopes, with weights offloaded.
  virtual std::pair<TensorStream, std::optional<Json>> get_per_tensor_param(const SyncOptions& options) = 0;

  virtual int get_data_parallel_rank() const = 0;
  virtual int get_data_parallel_size() const = 0;
  virtual const Group& get_data_parallel_group() const = 0;
  virtual bool is_mp_src_rank_with_outputs() const = 0;  // true on one rank of each model-parallel group

  // Moves state; `device` is "cpu" or the engine's device.  Whatever the offload settings say; calling it
  // twice changes nothing.  On an engine whose device is "cpu" it gives back the memory of the cast weights
  // (they are cast again when they are used) and of gradients that are zero.  BadConfig for grad without
  // model, and for another device.
  virtual void to(const std::string& device, bool model = true, bool optimizer = true, bool grad = true) = 0;

  // Saves into local_path (by custom .../global_step_N); when it returns the checkpoint is on disk.  Of those
  // that this engine has saved, the newest max_ckpt_to_keep stay (0: all), this one included; older folders
  // go when it is complete.  BadCheckpoint.
  virtual void save_checkpoint(const std::filesystem::path& local_path, int64_t global_step,
                               int64_t max_ckpt_to_keep = 0) = 0;
  // Empty path: nothing.  Takes that folder or throws BadCheckpoint, never another one.
  virtual void load_checkpoint(const std::filesystem::path& local_path) = 0;

  // Runs without the adapter for as long as the result lives.  An engine without one has nothing to switch
  // off.
  virtual std::shared_ptr<void> disable_adapter() { return nullptr; }
};

// Which engine a (model_type, backend, device) names.  A new registry holds the engines of this library:
// language_model and value_model, backends titanium and torchtitan (another name of it), device cpu.
class EngineRegistry {
 public:
  using Factory =
      std::function<std::unique_ptr<BaseEngine>(const EngineConfig&, Log&, std::shared_ptr<World>)>;
  EngineRegistry();
  // One factory for every combination of backends and devices.  Bug for a triple that is there already.
  void register_engine(const std::string& model_type, const std::vector<std::string>& backends,
                       const std::vector<std::string>& devices, Factory factory);
  // BadConfig lists the triples that exist.
  const Factory& get_engine_cls(const std::string& model_type, const std::string& backend,
                                const std::string& device) const;
  // `log` outlives the engine.  One rank of `world`; null: the only one.
  std::unique_ptr<BaseEngine> create(const std::string& model_type, const std::string& backend,
                                     const std::string& device, const EngineConfig& config, Log& log,
                                     std::shared_ptr<World> world = nullptr) const;

 private:
  std::map<std::tuple<std::string, std::string, std::string>, Factory> factories_;
};

}  // namespace titanium
