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
  if (config.parallelism.fsdp_reduce == "each_micro_batch") options.plan.reduce = ReduceWhen::kEachMicroBatch;
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

namespace {

std::string read_csv(const PipelineConfig& config) {
  try {
    return read_file(config.schedule_csv);
  } catch (const Error& e) {
    throw BadConfig("pipeline_parallel_schedule_csv: {}", e.what());
  }
}

// 0 for a key that is not given.
int32_t less_layers(const char* key, int64_t value, int64_t layers) {
  if (value > layers)
    throw BadConfig("{} = {}: allowed: 0 to {}, the layers of the model", key, value, layers);
  return static_cast<int32_t>(std::max<int64_t>(value, 0));
}

}  // namespace

int last_stage_rank(const PipelineConfig& config, int ranks) {
  if (ranks == 1) return 0;
  if (!config.schedule_csv.empty())
    return read_pipeline_csv(read_csv(config), config.schedule_csv, ranks, 1).rank_of.back();
  const PipelineSchedule& schedule = pipeline_schedule(config.schedule);
  return place_stages(schedule.placement, ranks, schedule.one_stage ? 1 : 2).back();
}

std::shared_ptr<const PipelineOptions> pipeline_options(const PipelineConfig& config, int ranks,
                                                        const Model& model) {
  if (ranks == 1) return nullptr;
  auto result = std::make_shared<PipelineOptions>();
  const auto blocks = static_cast<int32_t>(model.block_count());
  const int32_t first_less =
      less_layers("pipeline_parallel_first_stage_less_layers", config.first_less_layers, model.layers());
  const int32_t last_less =
      less_layers("pipeline_parallel_last_stage_less_layers", config.last_less_layers, model.layers());
  std::vector<int32_t> rank_of;
  if (!config.schedule_csv.empty()) {
    result->csv_file = config.schedule_csv;
    result->csv = read_csv(config);
    rank_of = read_pipeline_csv(result->csv, result->csv_file, ranks, 1).rank_of;
  } else {
    const PipelineSchedule& schedule = pipeline_schedule(config.schedule);
    result->schedule = schedule.name;
    result->stages_per_rank = schedule.one_stage ? 1 : 2;
    if (config.layers_per_stage > 0) {
      const int64_t layers = int64_t{model.layers()} + first_less + last_less;
      const int64_t stages =
          layers / config.layers_per_stage + (layers % config.layers_per_stage > 0 ? 1 : 0);
      if (stages % ranks != 0) {
        throw BadConfig(
            "pipeline_parallel_layers_per_stage = {}: {} layers make {} stages, which {} pipeline ranks do "
            "not divide; allowed: what makes a multiple of {} stages",
            config.layers_per_stage, layers, stages, ranks, ranks);
      }
      result->stages_per_rank = static_cast<int32_t>(stages / ranks);
    }
    check_stage_count(int64_t{ranks} * result->stages_per_rank, blocks);
    pipeline_order(schedule.name, ranks, result->stages_per_rank, 1);  // refuses what does not fit it
    rank_of = place_stages(schedule.placement, ranks, result->stages_per_rank);
  }
  const auto stages = static_cast<int32_t>(rank_of.size());
  if (config.first_less_layers >= 0 || config.last_less_layers >= 0) {
    result->stages.first_blocks =
        split_by_layers(static_cast<int32_t>(model.layers()), stages, first_less, last_less);
  } else {
    // Multiply-adds: a layer, and the head, which computes as much for V outputs as a matrix of its size.
    const HfConfig& c = model.config;
    const double layer =
        static_cast<double>(c.hidden_size) *
        (c.head_dim * (2 * c.num_attention_heads + 2 * c.num_key_value_heads) + 3 * c.intermediate_size);
    std::vector<double> costs(static_cast<size_t>(blocks), 1);
    costs.front() = 0.1;  // a copy of rows
    costs.back() =
        model.head ? static_cast<double>(c.vocab_size) * static_cast<double>(c.hidden_size) / layer : 0.1;
    result->stages.first_blocks = split_by_cost(costs, stages);
  }
  result->stages.rank_of_stage = std::move(rank_of);
  return result;
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
  StepOptions step = options.step;
  agree(mesh.all(), [&] {  // the model's stages
    step.pipeline = pipeline_options(options.pipeline, mesh.pp().size(), *session.model);
  });
  if (step.pipeline)
    agree_on(mesh.all(), fmt::format("pipeline_parallel_schedule_csv ({})", step.pipeline->csv_file),
             step.pipeline->csv);
  StoreOptions store;
  store.dtypes = options.dtypes;
  store.mesh = mesh;
  if (step.pipeline) {
    if (step.plan.reshard_after_forward == Reshard::kDefault)
      step.plan.reshard_after_forward = Reshard::kNever;
    const auto& [first, rank_of] = step.pipeline->stages;
    for (int block = 0; block < session.model->block_count(); ++block) {
      const auto stage = std::upper_bound(first.begin(), first.end(), block) - first.begin() - 1;
      store.pp_of_block.push_back(rank_of[stage]);
    }
  }
  if (!options.freeze.empty()) {
    store.frozen = [patterns = options.freeze](const std::string& name) {
      return std::any_of(patterns.begin(), patterns.end(),
                         [&](const std::string& pattern) { return matches_pattern(pattern, name); });
    };
  }
  session.store = std::make_unique<ParamStore>(*session.model->table, session.model->block_count(), store);
  const auto& units = session.store->places();
  if (!options.freeze.empty() &&
      std::none_of(units.begin(), units.end(), [](const UnitPlace& unit) { return unit.trainable; })) {
    throw BadConfig("{}: every weight is frozen, so there is nothing to train", options.freeze_key);
  }
  if (options.load_weights) load_session_weights(folder, options, session, log);
  session.step = std::make_unique<TrainStep>(*session.model, *session.store, step);
  return session;
}

SessionOptions session_options(const TrainConfig& config) {
  const auto& p = config.parallelism;
  SessionOptions options;
  options.dims = {.dp_replicate = static_cast<int>(p.data_parallel_replicate_degree),
                  .dp_shard = static_cast<int>(p.data_parallel_shard_degree),
                  .cp = static_cast<int>(p.context_parallel_degree),
                  .tp = static_cast<int>(p.tensor_parallel_degree),
                  .pp = static_cast<int>(p.pipeline_parallel_degree),
                  .ep = static_cast<int>(p.expert_parallel_degree)};
  options.dtypes = store_dtypes(config.training);
  options.step = step_options(config);
  options.freeze = config.model.freeze;
  options.freeze_key = "model.freeze";
  options.pipeline = {.schedule = p.pipeline_parallel_schedule,
                      .schedule_csv = p.pipeline_parallel_schedule_csv,
                      .layers_per_stage = p.pipeline_parallel_layers_per_stage,
                      .first_less_layers = p.pipeline_parallel_first_stage_less_layers,
                      .last_less_layers = p.pipeline_parallel_last_stage_less_layers};
  return options;
}

Session open_session(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
                     bool load_weights, std::shared_ptr<World> world) {
  for (const std::string& sentence : keys_without_effect(config)) log.warn("{}", sentence);
  SessionOptions options = session_options(config);
  options.world = std::move(world);
  options.load_weights = load_weights;
  return open_session(folder, options, log);
}

}  // namespace titanium
