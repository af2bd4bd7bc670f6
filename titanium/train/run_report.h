// Where a run's numbers go: progress line, metrics.jsonl, TensorBoard.
#pragma once
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "titanium/config/train_config.h"
#include "titanium/report/jsonl.h"
#include "titanium/report/log.h"
#include "titanium/report/progress.h"
#include "titanium/report/tensorboard.h"

namespace titanium {

// What one update did.
struct StepReport {
  int64_t step = 0;      // 1 is the first
  double loss = 0;       // of the global batch, by its averaging
  double grad_norm = 0;  // before clipping
  double lr = 0;
  bool skipped = false;  // the norm was not finite: weights and optimizer state are as before
  int64_t tokens = 0;    // of the global batch
  int64_t trained = 0;   // those with loss
  int64_t micro_batches = 0;
  double seconds = 0;
  double flops = 0;  // forward and backward, without recompute
};

class RunReport {
 public:
  // `peak_flops` a second, of the compute dtype's matrix product; 0 leaves MFU out.  A run that starts at
  // step 0 moves the metrics of an earlier one in the same folder aside.
  RunReport(const TrainConfig& config, int64_t resumed_step, int64_t steps, double peak_flops, Log& log);
  ~RunReport();
  void step(const StepReport& report);  // every step is recorded; log_freq decides which are shown
  // A resumed run validates again where the one before it stopped: that loss is shown, and recorded only
  // where the file does not have it.
  void validation(int64_t step, double loss);

 private:
  void write(int64_t step, const Metrics& metrics);

  const TrainConfig& config_;
  Log& log_;
  int64_t recorded_validation_ = -1;  // the step whose loss is in the files already
  int64_t steps_;
  double peak_flops_;
  ProgressLine line_;
  EtaClock eta_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::unique_ptr<JsonlMetrics> jsonl_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  bool disk_warned_ = false;
};

// FLOP/s of a large matrix product in this dtype on this machine, measured in about 0.2 s.
double measure_peak_flops(bool bf16, bool fp64);

}  // namespace titanium
