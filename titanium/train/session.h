// A checkpoint folder as something that runs: what every command starts from.
#pragma once
#include <filesystem>
#include <memory>

#include "titanium/config/pipeline_config.h"
#include "titanium/config/train_config.h"
#include "titanium/dist/parallel_dims.h"
#include "titanium/formats/json.h"
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

struct SessionOptions {
  ParallelDims dims;
  std::shared_ptr<World> world;  // null: one rank
  StoreDtypes dtypes;
  StepOptions step;
  std::vector<std::string> freeze;    // name patterns of weights that do not train
  std::string freeze_key = "freeze";  // for messages
  ModelHead head = ModelHead::kLanguageModel;
  Json override_config = Json::object();  // replaces keys of config.json
  uint64_t seed = 42;                     // of a value head that the files lack
  bool load_weights = true;
  PipelineConfig pipeline;
};

// Where the stages lie, from the keys; null for one pipeline rank.  BadConfig names the keys that do not fit
// the model.
std::shared_ptr<const PipelineOptions> pipeline_options(const PipelineConfig& config, int ranks,
                                                        const Model& model);

// The pipeline rank that has the head, which no model needs to be read for.
int last_stage_rank(const PipelineConfig& config, int ranks);

// Builds the model of folder/config.json and reads its weights.  A value model takes the files of a language
// model, of a TokenClassification or of a SequenceClassification model; what they lack of score.weight (or
// classifier.weight, v_head.summary.weight) and its bias starts as in transformers, normal and zero, and a
// log line says so.
Session open_session(const std::filesystem::path& folder, const SessionOptions& options, Log& log);

// The weights of another folder for the same model, as open_session reads them.
void load_session_weights(const std::filesystem::path& folder, const SessionOptions& options,
                          Session& session, Log& log);

// Builds the model of folder/config.json and, unless `load_weights` is false, reads its weights.  Dtypes,
// recompute and head rows are those of `config`; so are parallelism's degrees, which must fit the world
// (null: one rank).  Keys that change nothing are logged.
Session open_session(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
                     bool load_weights = true, std::shared_ptr<World> world = nullptr);

at::ScalarType scalar_type(Dtype dtype);  // F32, F64, BF16, F16, I64, I32; Bug for others
StoreDtypes store_dtypes(const TrainingConfig& config);
StepOptions step_options(const TrainConfig& config);
SessionOptions session_options(const TrainConfig& config);  // but for the world
OptimizerOptions optimizer_options(const OptimizerConfig& config);

}  // namespace titanium
