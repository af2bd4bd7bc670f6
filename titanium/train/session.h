// A checkpoint folder as something that runs: what every command starts from.
#pragma once
#include <filesystem>
#include <memory>

#include "titanium/config/train_config.h"
#include "titanium/models/model.h"
#include "titanium/optim/optimizer.h"
#include "titanium/report/log.h"
#include "titanium/shard/param_store.h"
#include "titanium/train/step.h"

namespace titanium {

struct Session {
  std::filesystem::path folder;
  ModelSpec spec;
  std::unique_ptr<Model> model;  // on the heap: step and store refer to it, and a Session may be moved
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<TrainStep> step;
};

// Builds the model of folder/config.json and, unless `load_weights` is false, reads its weights.  Dtypes,
// recompute and head rows are those of `config`; so are parallelism's degrees, which must fit one rank.
Session open_session(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
                     bool load_weights = true);

at::ScalarType scalar_type(Dtype dtype);  // F32, F64, BF16, F16, I64, I32; Bug for others
StoreDtypes store_dtypes(const TrainingConfig& config);
StepOptions step_options(const TrainConfig& config);
OptimizerOptions optimizer_options(const OptimizerConfig& config);

}  // namespace titanium
