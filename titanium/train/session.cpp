#include "titanium/train/session.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/config/name_pattern.h"
#include "titanium/dist/agree.h"
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
  const std::string& reshard = config.parallelism.fsdp_reshard_after_forward;
  options.plan.reshard_after_forward = reshard == "always"  ? Reshard::kAlways
                                       : reshard == "never" ? Reshard::kNever
                                                            : Reshard::kDefault;
  options.keep_casts = !config.training.enable_cpu_offload;
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

namespace {

// A config.json of this family's language model in place of one of its classifiers, which differ in the head
// alone.
Json as_language_model(Json json) {
  const auto list = json.find("architectures");
  if (list == json.end() || !list->is_array()) return json;
  for (Json& entry : *list) {
    if (!entry.is_string()) continue;
    std::string text = entry.get<std::string>();
    for (const std::string ending : {"ForTokenClassification", "ForSequenceClassification"}) {
      if (text.ends_with(ending)) text = text.substr(0, text.size() - ending.size()) + "ForCausalLM";
    }
    entry = text;
  }
  return json;
}

HfConfig read_config(const std::filesystem::path& folder, const SessionOptions& options) {
  require_model_folder(folder);
  const std::filesystem::path file = folder / "config.json";
  Json json = read_json(file);
  if (json.is_object()) json.update(options.override_config);
  if (options.head == ModelHead::kValue) json = as_language_model(std::move(json));
  return HfConfig::from_json(json, file.string());
}

HfLoadOptions load_options(const SessionOptions& options) {
  HfLoadOptions load;
  if (options.head != ModelHead::kValue) return load;
  load.optional = {"score.weight", "score.bias"};
  load.other_names = {{"classifier.weight", "score.weight"},
                      {"classifier.bias", "score.bias"},
                      {"v_head.summary.weight", "score.weight"},
                      {"v_head.summary.bias", "score.bias"}};
  load.ignored_endings.push_back("lm_head.weight");
  return load;
}

}  // namespace

void load_session_weights(const std::filesystem::path& folder, const SessionOptions& options,
                          Session& session, Log& log) {
  const HfLoadReport report = load_hf(folder, *session.store, load_options(options));
  log.info("{}: {} tensors, {} read", folder.string(), report.tensors, human_bytes(report.bytes));
  for (const std::string& ignored : report.ignored) log.info("{}: {} is not used", folder.string(), ignored);
  for (const std::string& missing : report.missing) {
    log.info("{}: has no {}: it starts {}", folder.string(), missing,
             session.store->weight(missing).init().kind == Init::kZeros
                 ? std::string("at zero")
                 : fmt::format("random, of the seed {}", options.seed));
  }
  session.store->init(options.seed, [&](const Weight& weight) {
    return std::find(report.missing.begin(), report.missing.end(), weight.name()) != report.missing.end();
  });
}

Session open_session(const std::filesystem::path& folder, const SessionOptions& options, Log& log) {
  const std::shared_ptr<World> world = options.world ? options.world : solo_world();
  ParallelDims dims = options.dims;
  dims.world_size = world->size();
  dims.resolve();
  const Mesh mesh(dims, world);
  Session session;
  session.folder = folder;
  agree(mesh.all(), [&] {  // files and what they say
    session.spec = model_registry(read_config(folder, options), options.head);
    session.model = std::make_unique<Model>(session.spec.build(session.spec.config, Tp(mesh.tp())));
    std::vector<std::string> names;
    for (const auto& weight : session.model->table->weights()) names.push_back(weight->name());
    check_patterns(options.freeze, names, options.freeze_key);
  });
  agree_on(mesh.all(), "the model's config.json", session.spec.config.to_json().dump(1));
  StoreOptions store;
  store.dtypes = options.dtypes;
  store.mesh = mesh;
  if (!options.freeze.empty()) {
    store.frozen = [patterns = options.freeze](const std::string& name) {
      return std::any_of(patterns.begin(), patterns.end(),
                         [&](const std::string& pattern) { return matches_pattern(pattern, name); });
    };
  }
  session.store = std::make_unique<ParamStore>(*session.model->table, session.model->block_count(), store);
  const auto& units = session.store->units();
  if (!options.freeze.empty() &&
      std::none_of(units.begin(), units.end(), [](const auto& unit) { return unit->trainable(); })) {
    throw BadConfig("{}: every weight is frozen, so there is nothing to train", options.freeze_key);
  }
  if (options.load_weights) load_session_weights(folder, options, session, log);
  session.step = std::make_unique<TrainStep>(*session.model, *session.store, options.step);
  return session;
}

Session open_session(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
                     bool load_weights, std::shared_ptr<World> world) {
  const auto& p = config.parallelism;
  SessionOptions options;
  options.dims = {.dp_replicate = static_cast<int>(p.data_parallel_replicate_degree),
                  .dp_shard = static_cast<int>(p.data_parallel_shard_degree),
                  .cp = static_cast<int>(p.context_parallel_degree),
                  .tp = static_cast<int>(p.tensor_parallel_degree),
                  .pp = static_cast<int>(p.pipeline_parallel_degree),
                  .ep = static_cast<int>(p.expert_parallel_degree)};
  options.world = std::move(world);
  options.dtypes = store_dtypes(config.training);
  options.step = step_options(config);
  options.freeze = config.model.freeze;
  options.freeze_key = "model.freeze";
  options.load_weights = load_weights;
  return open_session(folder, options, log);
}

}  // namespace titanium
