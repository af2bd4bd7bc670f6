#include "titanium/train/session.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/dist/parallel_dims.h"
#include "titanium/report/format.h"
#include "titanium/weights/hf_load.h"

namespace titanium {

at::ScalarType scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::F64:
      return at::kDouble;
    case Dtype::F32:
      return at::kFloat;
    case Dtype::F16:
      return at::kHalf;
    case Dtype::BF16:
      return at::kBFloat16;
    case Dtype::I64:
      return at::kLong;
    case Dtype::I32:
      return at::kInt;
    default:
      throw Bug("no tensor dtype for {}", name(dtype));
  }
}

StoreDtypes store_dtypes(const TrainingConfig& config) {
  return {scalar_type(config.dtype), scalar_type(config.mixed_precision_param),
          scalar_type(config.mixed_precision_reduce)};
}

StepOptions step_options(const TrainConfig& config) {
  StepOptions options;
  const auto& ac = config.activation_checkpoint;
  options.keep_cheap = true;
  if (ac.mode == "full") {
    options.plan.recompute = Recompute::kFull;
  } else if (ac.mode == "selective" && ac.selective_ac_option == "op") {
    options.keep_cheap = false;
  } else if (ac.mode == "selective") {
    options.plan.recompute = Recompute::kEveryNth;
    options.plan.recompute_every =
        std::stoi(ac.selective_ac_option);  // the config has checked that it is a number
  }
  options.head_rows = config.training.head_rows == "all" ? HeadRows::kAll : HeadRows::kWeighted;
  return options;
}

OptimizerOptions optimizer_options(const OptimizerConfig& c) {
  return {.name = c.name,
          .beta1 = c.beta1,
          .beta2 = c.beta2,
          .eps = c.eps,
          .weight_decay = c.weight_decay,
          .momentum = c.momentum,
          .decay_norms_and_biases = c.decay_norms_and_biases,
          .state_dtype =
              c.state_dtype == Dtype::BF16 ? at::kBFloat16 : at::kFloat};  // fp64 masters have fp64 state
}

Session open_session(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
                     bool load_weights) {
  const auto& p = config.parallelism;
  ParallelDims dims{.dp_replicate = static_cast<int>(p.data_parallel_replicate_degree),
                    .dp_shard = static_cast<int>(p.data_parallel_shard_degree),
                    .cp = static_cast<int>(p.context_parallel_degree),
                    .tp = static_cast<int>(p.tensor_parallel_degree),
                    .pp = static_cast<int>(p.pipeline_parallel_degree),
                    .ep = static_cast<int>(p.expert_parallel_degree)};
  dims.resolve();
  Session session;
  session.folder = folder;
  session.spec = model_registry(HfConfig::from_folder(folder));
  session.model = std::make_unique<Model>(session.spec.build(session.spec.config));
  StoreOptions options;
  options.dtypes = store_dtypes(config.training);
  session.store = std::make_unique<ParamStore>(*session.model->table, session.model->block_count(), options);
  if (load_weights) {
    const HfLoadReport report = load_hf(folder, *session.store);
    log.info("{}: {} tensors, {} read", folder.string(), report.tensors, human_bytes(report.bytes));
    for (const std::string& ignored : report.ignored)
      log.info("{}: {} is not used", folder.string(), ignored);
  }
  session.step = std::make_unique<TrainStep>(*session.model, *session.store, step_options(config));
  return session;
}

}  // namespace titanium
