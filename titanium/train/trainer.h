// `titanium train`: a run from its config to its exported model.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "titanium/config/train_config.h"
#include "titanium/data/loader.h"
#include "titanium/optim/clip.h"
#include "titanium/optim/lr_schedule.h"
#include "titanium/optim/optimizer.h"
#include "titanium/report/log.h"
#include "titanium/train/run_report.h"
#include "titanium/train/session.h"
#include "titanium/train/training_data.h"
#include "titanium/weights/checkpoint.h"

namespace titanium {

class Trainer {
 public:
  using Config = TrainConfig;

  // Reads everything that the run needs and that can be wrong: model, data, the checkpoint to resume. Errors:
  // see error.h.  Nothing is written before the first update.
  Trainer(Config config, Log& log);
  ~Trainer();

  struct Outcome {
    int64_t step = 0;          // updates of the run, those before a resume included
    bool interrupted = false;  // `stop` came first; the run can be resumed
    std::optional<double> validation_before, validation_after;  // mean loss of a validation token
  };
  // Trains until the last step, or until `stop` is true: then it finishes the update, saves, and returns.
  Outcome run(const std::atomic<bool>& stop);

  const Session& session() const { return session_; }

 private:
  std::filesystem::path resume_from() const;
  void start();  // from a checkpoint of this run, or from initial weights
  void restore(const LoadedCheckpoint& loaded);
  void summary();
  StepReport train_step(Step step);
  std::optional<double> validate();
  Json train_state() const;
  void save();
  void export_model();
  bool due(int64_t interval) const { return interval > 0 && step_ % interval == 0; }

  Config config_;
  Log& log_;
  Session session_;
  TrainingData data_;
  std::unique_ptr<Optimizer> optimizer_;
  LRSchedulersContainer schedule_;
  std::unique_ptr<Checkpointer> checkpointer_;
  std::unique_ptr<Loader> loader_;
  int64_t step_ = 0;         // updates done
  int64_t saved_step_ = -1;  // of the last save that was started
};

}  // namespace titanium
