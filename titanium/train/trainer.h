// `titanium train`: a run from its config to its exported model.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>

#include "titanium/config/train_config.h"
#include "titanium/data/loader.h"
#include "titanium/optim/clip.h"
#include "titanium/optim/lr_schedule.h"
#include "titanium/optim/optimizer.h"
#include "titanium/report/log.h"
#include "titanium/train/run_lock.h"
#include "titanium/train/run_report.h"
#include "titanium/train/session.h"
#include "titanium/train/training_data.h"
#include "titanium/weights/checkpoint.h"
#include "titanium/weights/hf_export.h"

namespace titanium {

class Trainer {
 public:
  using Config = TrainConfig;

  // Reads everything that the run needs and that can be wrong: the folders it will write to, weights or the
  // checkpoint to resume, data.  Errors: see error.h.  Nothing but the lock is written before the first
  // update.
  // Over the ranks of `world` (null: one), which all get the same outcome or the same error.
  Trainer(Config config, Log& log, std::shared_ptr<World> world = nullptr);
  ~Trainer();

  struct Outcome {
    int64_t start = 0;         // updates before this call: those of the run that this one resumes
    int64_t step = 0;          // updates of the run, those before a resume included
    bool interrupted = false;  // `stop` came first
    bool saved = false;        // there is a checkpoint of `step`
    std::optional<double> validation_before, validation_after;  // mean loss of a validation token
  };
  // Trains until the last step, or until `stop` is true: then it finishes the update, saves, and returns.  A
  // save that fails is a warning while later ones may still succeed; the error of the last one is thrown,
  // after the export.  BadData when the weights have become infinite or NaN: nothing is saved or exported
  // then.
  Outcome run(const std::atomic<bool>& stop);

  const Session& session() const { return session_; }

 private:
  bool leads() const { return world_->rank() == 0; }  // writes what is written once
  std::unique_ptr<RunLock> lock_folder() const;
  void check_folders() const;
  void check_export_folder() const;
  std::unique_ptr<Checkpointer> make_checkpointer();
  std::filesystem::path resume_from() const;
  // Weights, and where a run goes on its optimizer state and what that run saved with them.
  std::optional<LoadedCheckpoint> load_weights();
  TrainingData load_data();
  void restore(const LoadedCheckpoint& loaded);
  void summary();
  StepReport train_step(Step step);
  void tell_packing(const std::vector<PackedBatch>& batches, int64_t tokens);
  std::optional<double> validate();
  size_t validation_end() const;
  Json identity() const;
  Json train_state() const;
  void save_now();   // this state, unless it has been saved; throws
  void save();       // the same; a failure is a warning
  void poll_save();  // warns, as soon as it is known, of a save that failed meanwhile
  void save_failed(const char* why);
  std::exception_ptr save_at_end();  // waits; null when this state is on disk
  void check_finite() const;
  HfExportOptions export_options() const;
  void export_model();
  bool due(int64_t interval) const { return interval > 0 && step_ % interval == 0; }

  // In the order in which they are made: what can be wrong and is quickly read comes first.
  Config config_;
  Log& log_;
  std::shared_ptr<World> world_;
  std::unique_ptr<RunLock> lock_;
  Session session_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<Checkpointer> checkpointer_;
  bool resumed_ = false;  // loaded_ is this run's own
  std::optional<LoadedCheckpoint> loaded_;
  TrainingData data_;
  LRSchedulersContainer schedule_;
  std::unique_ptr<Loader> loader_;
  int64_t step_ = 0;  // updates done
  bool packing_told_ = false;
  int64_t saved_step_ = -1;  // of the last save that was started and is not known to have failed
};

}  // namespace titanium
