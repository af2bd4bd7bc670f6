// BaseEngine over train/step.h: one model, its optimizer, its schedule.  Thin: what a step computes is in
// train/, what a loss is in loss/, what a checkpoint is in weights/.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "titanium/dist/mesh.h"
#include "titanium/engine/engine.h"
#include "titanium/optim/lr_schedule.h"
#include "titanium/optim/optimizer.h"
#include "titanium/train/session.h"

namespace titanium {

class TitanEngine : public BaseEngine {
 public:
  // `device`: "cpu".  No heavy work: ranks and sizes answer from here on, everything else after initialize()
  // (BadConfig before it).
  TitanEngine(ModelHead head, EngineConfig config, std::string device, Log& log,
              std::shared_ptr<World> world);
  ~TitanEngine() override;

  void set_total_training_steps(int64_t steps) override;
  void initialize() override;
  bool is_param_offload_enabled() const override { return config_.engine.param_offload; }
  bool is_optimizer_offload_enabled() const override { return config_.engine.optimizer_offload; }
  void enter_mode(Mode mode, ModeOptions options) override;
  void exit_mode(bool failed) override;
  Mode mode() const override { return scopes_.empty() ? Mode::kNone : scopes_.back().mode; }
  void optimizer_zero_grad() override;
  double optimizer_step() override;
  double lr_scheduler_step() override;
  std::vector<ParamGroup>& param_groups() override { return groups_; }
  EngineOutput forward_backward_batch(const EngineBatch& batch, const Loss* loss, bool forward_only) override;
  EngineOutput train_batch(const EngineBatch& batch, const Loss& loss) override;
  std::pair<TensorStream, std::optional<Json>> get_per_tensor_param(const SyncOptions& options) override;
  int get_data_parallel_rank() const override { return mesh_.data().rank(); }
  int get_data_parallel_size() const override { return mesh_.data().size(); }
  const Group& get_data_parallel_group() const override { return mesh_.data(); }
  bool is_mp_src_rank_with_outputs() const override {
    return mesh_.tp().rank() == 0 && mesh_.at().pp == last_stage_;
  }
  void to(const std::string& device, bool model, bool optimizer, bool grad) override;
  void save_checkpoint(const std::filesystem::path& local_path, int64_t global_step,
                       int64_t max_ckpt_to_keep) override;
  void load_checkpoint(const std::filesystem::path& local_path) override;

  const EngineConfig& config() const { return config_; }
  const Session& session() const { return *session_; }

 protected:
  // What the head of this engine can give, and under which names.
  virtual void check_asked(const EngineBatch& batch, const Loss* loss) const = 0;
  virtual std::vector<std::pair<std::string, at::Tensor TokenStats::*>> outputs() const = 0;

 private:
  struct Scope {
    Mode mode;
    ModeOptions options;
    bool offloads;  // the outermost that may
  };

  SessionOptions session_options() const;
  void require_initialized(const char* call) const;
  void require_optimizer(const char* call) const;
  bool leads() const { return world_->rank() == 0; }  // writes what is written once
  void check_samples(const EngineBatch& batch) const;
  std::string arguments(const EngineBatch& batch, const Loss* loss, bool forward_only) const;
  void check_counts(const Counts& given, const Counts& own) const;
  std::vector<PackedBatch> pack_batch(const EngineBatch& batch, const Loss* loss, bool forward_only) const;
  double step(bool zero_grad);
  void zero_gradients();
  void apply_groups();
  Json config_json() const;  // of a checkpoint's huggingface folder
  void save_huggingface(const std::filesystem::path& folder) const;
  // What a checkpoint says beside weights and state.
  struct Position {
    int64_t schedule = 0;
    std::optional<ParamGroup> group;
  };
  Position position_in(const std::filesystem::path& checkpoint, bool takes_optimizer, bool takes_extra) const;
  void on_first_rank(const std::function<void()>& work) const;
  void prune(const std::filesystem::path& saved, int64_t keep);

  ModelHead head_;
  EngineConfig config_;
  std::string device_;
  Log& log_;
  std::shared_ptr<World> world_;
  Mesh mesh_;
  int last_stage_ = 0;  // the pipeline rank that has the head
  std::unique_ptr<Session> session_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<LRSchedulersContainer> schedule_;
  std::vector<ParamGroup> groups_;
  std::vector<Scope> scopes_;
  bool gradients_ = false;                    // something was added since they were zeroed
  std::vector<std::filesystem::path> saved_;  // by this engine, oldest first
};

// log_probs, entropy, sum_pi_squared.
class TitanEngineWithLMHead final : public TitanEngine {
 public:
  TitanEngineWithLMHead(EngineConfig config, std::string device, Log& log,
                        std::shared_ptr<World> world = nullptr)
      : TitanEngine(ModelHead::kLanguageModel, std::move(config), std::move(device), log, std::move(world)) {}

 protected:
  void check_asked(const EngineBatch& batch, const Loss* loss) const override;
  std::vector<std::pair<std::string, at::Tensor TokenStats::*>> outputs() const override;
};

// values, of score.weight [1, D] and score.bias: a critic, or a reward model.
class TitanEngineWithValueHead final : public TitanEngine {
 public:
  TitanEngineWithValueHead(EngineConfig config, std::string device, Log& log,
                           std::shared_ptr<World> world = nullptr)
      : TitanEngine(ModelHead::kValue, std::move(config), std::move(device), log, std::move(world)) {}

 protected:
  void check_asked(const EngineBatch& batch, const Loss* loss) const override;
  std::vector<std::pair<std::string, at::Tensor TokenStats::*>> outputs() const override;
};

}  // namespace titanium
