#include "titanium/engine/engine_config.h"

#include <algorithm>
#include <cmath>

#include "titanium/base/error.h"
#include "titanium/config/nearest.h"
#include "titanium/engine/config_keys.h"

namespace titanium {
namespace {

Dtype dtype_of(ConfigKeys& keys, const std::string& key, const std::string& name) {
  const std::string text = name == "fp32"   ? "float32"
                           : name == "bf16" ? "bfloat16"
                           : name == "fp64" ? "float64"
                                            : name;
  const std::optional<Dtype> dtype = parse_dtype(text);
  if (text == "fp16" || (dtype && *dtype == Dtype::F16))
    keys.fail(
        key,
        "float16 needs a loss scaler, which this engine does not have; allowed: bfloat16, float32, float64");
  if (!dtype || (*dtype != Dtype::BF16 && *dtype != Dtype::F32 && *dtype != Dtype::F64))
    keys.fail(key, "allowed: bfloat16, float32, float64");
  return *dtype;
}

EngineModelConfig read_model(ConfigKeys keys) {
  EngineModelConfig model;
  const auto path = keys.text("path");
  model.path = keys.text("local_path").value_or(path.value_or(""));
  if (model.path.empty()) keys.fail("path", "the folder of a Hugging Face checkpoint is needed");
  const auto tokenizer = keys.text("tokenizer_path");
  model.tokenizer_path = keys.text("local_tokenizer_path").value_or(tokenizer.value_or(""));
  for (const char* key : {"hf_config_path", "local_hf_config_path"}) {
    const auto other = keys.text(key);
    if (other && *other != model.path && (!path || *other != *path))
      keys.fail(
          key,
          "config.json is read from the folder of the weights; keys that differ go into override_config");
  }
  model.override_config = Json::object();
  if (const Json* override_config = keys.find("override_config")) {
    if (!override_config->is_object()) keys.fail("override_config", "allowed: an object");
    const auto nested = override_config->find("model_config");  // verl's PPO configs
    model.override_config =
        nested == override_config->end() || nested->is_null() ? *override_config : *nested;
    if (!model.override_config.is_object()) keys.fail("override_config", "model_config must be an object");
    for (const char* key : {"attn_implementation", "model_config", "moe_config"})
      model.override_config.erase(key);
  }
  model.freeze = keys.texts("freeze");

  const std::string no_lora = "there are no adapters in this version";
  keys.only("lora_rank", {0}, no_lora + "; allowed: 0");
  keys.only("lora_adapter_path", {""}, no_lora);
  if (const Json* lora = keys.find("lora"); lora && lora->is_object() && lora->value("rank", Json(0)) != 0)
    keys.fail("lora", no_lora);
  for (const char* key : {"lora_alpha", "target_modules", "target_parameters", "exclude_modules"})
    keys.find(key);
  if (const Json* mtp = keys.find("mtp");
      mtp && mtp->is_object() && mtp->value("enable", Json(false)) != false)
    keys.fail("mtp", "there is no multi-token prediction in this version");
  if (const Json* tiled = keys.find("tiled_mlp");
      tiled && tiled->is_object() && tiled->value("enabled", Json(false)) == true)
    keys.no_effect("tiled_mlp", Json(), "the MLP is computed in tiles anyway");
  keys.only("enable_activation_offload", {false},
            "activations stay where they are; engine.activation_checkpoint saves memory");
  keys.no_effect("enable_gradient_checkpointing", true, "engine.activation_checkpoint decides");
  keys.no_effect("use_liger", false, "the kernels are fused by hand");
  keys.no_effect("use_fused_kernels", false, "the head is always fused");
  keys.no_effect("use_remove_padding", true, "sequences are always packed without padding");
  keys.no_effect("trust_remote_code", false, "no code of the checkpoint runs");
  for (const char* key :
       {"model_type", "load_tokenizer", "architectures", "use_shm", "external_lib", "custom_chat_template",
        "fused_kernel_options", "hf_config", "generation_config", "tokenizer", "processor"})
    keys.find(key);  // the caller's own business
  keys.finish();
  return model;
}

void read_precision(ConfigKeys& keys, EngineRunConfig& engine) {
  const auto given = keys.text("dtype");
  std::optional<std::string> param = given, reduce;
  std::string param_key = "dtype";
  if (const Json* mixed = keys.find("mixed_precision");
      mixed && mixed->is_object()) {  // the form of verl's fsdp
    for (const auto& [key, value] : mixed->items()) {
      if (value.is_null() || key == "buffer_dtype") continue;
      if (!value.is_string() || (key != "param_dtype" && key != "reduce_dtype"))
        keys.fail("mixed_precision",
                  "allowed: an object of param_dtype, reduce_dtype, buffer_dtype, each a string");
      (key == "param_dtype" ? param : reduce) = value.get<std::string>();
      if (key == "param_dtype") param_key = "mixed_precision";
    }
  } else if (mixed) {
    if (!mixed->is_boolean())
      keys.fail("mixed_precision", "allowed: true, false, or an object of param_dtype, reduce_dtype");
    keys.no_effect("mixed_precision", false, "dtype says what is computed in, model_dtype what is kept");
  }
  if (param) engine.dtype = dtype_of(keys, param_key, *param);
  const Dtype wide = engine.dtype == Dtype::F64 ? Dtype::F64 : Dtype::F32;
  const auto masters = keys.text("model_dtype");
  engine.model_dtype = masters ? dtype_of(keys, "model_dtype", *masters) : wide;
  engine.reduce_dtype = reduce ? dtype_of(keys, "mixed_precision", *reduce) : wide;
  if (engine.reduce_dtype != wide) {
    keys.fail("mixed_precision", fmt::format("gradients of a {} computation are summed in {}",
                                             torch_name(engine.dtype), torch_name(wide)));
  }
}

EngineRunConfig read_engine(ConfigKeys keys) {
  EngineRunConfig engine;
  engine.param_offload = keys.boolean("param_offload").value_or(false);
  engine.optimizer_offload = keys.boolean("optimizer_offload").value_or(false);
  keys.only("offload_policy", {false}, "use param_offload and optimizer_offload");
  engine.forward_only = keys.boolean("forward_only").value_or(false);
  engine.seed = static_cast<uint64_t>(keys.integer("seed", 0).value_or(42));
  read_precision(keys, engine);

  keys.one_of("strategy", {"titanium", "torchtitan"});
  const auto degree = [&](const char* key, int64_t least = 1) {
    const int64_t value = keys.integer(key, least).value_or(1);
    if (value > (1 << 20)) keys.fail(key, "allowed: at most 1048576");
    return static_cast<int>(value);
  };
  engine.dims.dp_replicate = degree("data_parallel_replicate_size");
  engine.dims.dp_shard = degree("data_parallel_shard_size", -1);
  engine.dims.cp = degree("context_parallel_size");
  engine.dims.tp = degree("tensor_parallel_size");
  engine.dims.pp = degree("pipeline_parallel_size");
  engine.dims.ep = degree("expert_parallel_size");
  const int data = degree("data_parallel_size");
  if (data != 1 && engine.dims.dp_shard > 0 && data != engine.dims.dp_replicate * engine.dims.dp_shard) {
    keys.fail("data_parallel_size",
              fmt::format("data_parallel_replicate_size x data_parallel_shard_size is {}",
                          engine.dims.dp_replicate * engine.dims.dp_shard));
  }
  keys.only("expert_tensor_parallel_size", {1}, "experts are not cut by tensor parallelism; allowed: 1");

  PipelineConfig& pipeline = engine.pipeline;
  pipeline.schedule = keys.text("pipeline_parallel_schedule").value_or(pipeline.schedule);
  pipeline.schedule_csv = keys.text("pipeline_parallel_schedule_csv").value_or("");
  pipeline.layers_per_stage = keys.integer("pipeline_parallel_layers_per_stage", 0).value_or(0);
  pipeline.first_less_layers = keys.integer("pipeline_parallel_first_stage_less_layers", -1).value_or(-1);
  pipeline.last_less_layers = keys.integer("pipeline_parallel_last_stage_less_layers", -1).value_or(-1);

  engine.reshard_after_forward =
      keys.one_of("reshard_after_forward", {"default", "always", "never"}).value_or("default");
  engine.fsdp_reduce = keys.one_of("fsdp_reduce", {"last", "each_micro_batch"}).value_or("last");
  engine.forward_prefetch = keys.boolean("forward_prefetch").value_or(false);
  engine.activation_checkpoint =
      keys.one_of("activation_checkpoint", {"selective", "full", "none"}).value_or("selective");
  engine.max_seq_len = keys.integer("max_seq_len", 1).value_or(0);

  engine.use_dynamic_bsz = keys.boolean("use_dynamic_bsz").value_or(true);
  engine.max_token_len_per_gpu = keys.integer("max_token_len_per_gpu", 1).value_or(0);
  engine.micro_batch_size_per_gpu = keys.integer("micro_batch_size_per_gpu", 1).value_or(0);
  engine.infer_max_token_len_per_gpu = keys.integer("infer_max_token_len_per_gpu", 1).value_or(0);
  engine.infer_micro_batch_size_per_gpu = keys.integer("infer_micro_batch_size_per_gpu", 1).value_or(0);

  keys.one_of("attn_type", {"flex", "flex_flash", "varlen", "sdpa"});
  keys.no_effect("attn_type", "flex", "there is one attention, for packed sequences");
  keys.one_of("spmd_backend", {"default", "full_dtensor", "spmd_types"});
  keys.no_effect("spmd_backend", "spmd_types", "there is no DTensor");
  if (const Json* wrap = keys.find("wrap_policy"); wrap && !wrap->is_object())
    keys.fail("wrap_policy", "allowed: an object");
  keys.no_effect("wrap_policy", Json{{"min_num_params", 0}}, "a block is what is gathered together");
  keys.no_effect("use_orig_params", false, "parameters are always those of the checkpoint");
  keys.no_effect("use_torch_compile", true, "there is no graph compiler; the kernels are fused by hand");
  const char* head = "the head never holds logits, so it is always computed in chunks";
  keys.no_effect("entropy_from_logits_with_chunking", false, head);
  keys.no_effect("entropy_from_logits_chunk_size", 2048, head);
  keys.no_effect("entropy_checkpointing", false, head);
  keys.no_effect("full_determinism", false, "every sum has one order, always");
  keys.no_effect("use_fused_kernels", false, "the head is always fused");
  keys.no_effect("use_remove_padding", true, "sequences are always packed without padding");
  if (const Json* replay = keys.find("router_replay");
      replay && replay->is_object() && replay->value("mode", Json("disabled")) != "disabled")
    keys.fail("router_replay", "these models have no router; allowed: mode disabled");
  keys.finish();
  return engine;
}

void read_overrides(ConfigKeys& keys, EngineOptimizerConfig& o) {
  const Json* given = keys.find("override_optimizer_config");
  if (!given) return;
  const char* key = "override_optimizer_config";
  if (!given->is_object()) keys.fail(key, "allowed: an object");
  const std::vector<std::string> known = {"lr", "eps", "weight_decay", "betas", "momentum"};
  for (const auto& [name, value] : given->items()) {
    if (name == "fused" || name == "foreach" || name == "capturable" || value.is_null())
      continue;                                          // how, not what
    if (value.is_boolean() && value == false) continue;  // amsgrad, maximize
    if (name == "betas" && value.is_array() && value.size() == 2 && value[0].is_number() &&
        value[1].is_number()) {
      o.beta1 = value[0].get<double>();
      o.beta2 = value[1].get<double>();
    } else if (!value.is_number() || std::find(known.begin(), known.end(), name) == known.end() ||
               name == "betas") {
      keys.fail(
          key,
          fmt::format("'{}' is not an option here; allowed: lr, eps, weight_decay, betas, momentum", name));
    } else {
      (name == "lr"         ? o.lr
       : name == "eps"      ? o.eps
       : name == "momentum" ? o.momentum
                            : o.weight_decay) = value.get<double>();
    }
  }
}

void read_schedule(ConfigKeys& keys, EngineOptimizerConfig& o) {
  o.total_training_steps = keys.integer("total_training_steps", -1).value_or(-1);
  o.lr_warmup_steps = keys.integer("lr_warmup_steps", -1).value_or(-1);
  const auto share = [&](const char* key, double usual) {
    const double value = keys.number_from(key, 0).value_or(usual);
    if (value > 1) keys.fail(key, "allowed: a number in [0, 1]");
    return value;
  };
  o.lr_warmup_steps_ratio = share("lr_warmup_steps_ratio", 0);
  const bool has_verl_minimum = keys.find("min_lr_ratio") != nullptr;
  const double verl_minimum = share("min_lr_ratio", 0), torchtitan_minimum = share("min_lr_factor", 0);
  o.num_cycles = keys.number_from("num_cycles", 0).value_or(0.5);
  o.zero_indexed_step = keys.boolean("zero_indexed_step").value_or(true);
  const auto old_name = keys.one_of("warmup_style", {"constant", "cosine"});
  const auto type = keys.one_of("lr_scheduler_type", {"constant", "cosine"});
  const auto decay = keys.one_of("decay_type", {"linear", "sqrt", "cosine"});
  if (decay && (type || old_name || has_verl_minimum)) {
    keys.fail("decay_type", fmt::format("this is torchtitan's rule and {} is verl's: give one of them",
                                        type       ? "lr_scheduler_type"
                                        : old_name ? "warmup_style"
                                                   : "min_lr_ratio"));
  }
  o.torchtitan_rule = decay.has_value();
  o.decay = parse_lr_decay(decay ? *decay : old_name ? *old_name : type.value_or("constant"));
  o.min_lr_factor = decay ? torchtitan_minimum : verl_minimum;
}

EngineOptimizerConfig read_optimizer(ConfigKeys keys) {
  EngineOptimizerConfig o;
  const auto fsdp_name = keys.text("optimizer");
  const auto name = keys.text("name");
  for (const auto& [key, given] : {std::pair{"optimizer", fsdp_name}, {"name", name}}) {
    if (given && *given != "AdamW" && *given != "SGD")
      keys.fail(key,
                *given == "Adam" ? "its decay is not decoupled; allowed: AdamW, SGD" : "allowed: AdamW, SGD");
  }
  if (fsdp_name && name && *fsdp_name != *name) keys.fail("name", fmt::format("optimizer is {}", *fsdp_name));
  o.name = name ? *name : fsdp_name.value_or("AdamW");
  keys.only("optimizer_impl", {"torch.optim"},
            "the update rules here are those of torch.optim; allowed: torch.optim");
  o.lr = keys.number("lr").value_or(o.lr);
  o.eps = keys.number("eps").value_or(o.eps);
  o.weight_decay = keys.number("weight_decay").value_or(o.weight_decay);
  if (const Json* betas = keys.find("betas")) {
    if (!betas->is_array() || betas->size() != 2 || !(*betas)[0].is_number() || !(*betas)[1].is_number())
      keys.fail("betas", "allowed: two numbers in [0, 1)");
    o.beta1 = (*betas)[0].get<double>();
    o.beta2 = (*betas)[1].get<double>();
  }
  o.momentum = keys.number("momentum").value_or(0);
  const auto clip = keys.number_from("clip_grad", 0);
  o.clip_grad =
      keys.number_from("grad_clip", 0).value_or(clip.value_or(1.0));  // the old name wins, as in verl
  read_overrides(keys, o);
  read_schedule(keys, o);
  const auto check = [&](bool ok, const char* key, double value, const char* allowed) {
    if (!ok) keys.fail(key, fmt::format("{} is out of range; allowed: {}", value, allowed));
  };
  check(o.lr >= 0, "lr", o.lr, "a number >= 0");
  check(o.eps > 0, "eps", o.eps, "a number > 0");
  check(o.weight_decay >= 0, "weight_decay", o.weight_decay, "a number >= 0");
  check(o.beta1 >= 0 && o.beta1 < 1, "betas", o.beta1, "two numbers in [0, 1)");
  check(o.beta2 >= 0 && o.beta2 < 1, "betas", o.beta2, "two numbers in [0, 1)");
  check(o.momentum >= 0 && o.momentum < 1, "momentum", o.momentum, "a number in [0, 1)");
  keys.finish();
  return o;
}

CheckpointContents read_contents(ConfigKeys& keys, const char* key, bool saves) {
  if (!keys.find(key)) return {};
  CheckpointContents contents{false, false, false, false};
  for (const std::string& entry : keys.texts(key)) {
    if (entry == "model") {
      contents.model = true;
    } else if (entry == "optimizer") {
      contents.optimizer = true;
    } else if (entry == "extra") {
      contents.extra = true;
    } else if (entry == "hf_model") {
      contents.hf_model = true;
    } else {
      const std::vector<std::string> known = {"model", "optimizer", "extra", "hf_model"};
      const std::string near = nearest(entry, known);
      keys.fail(
          key, fmt::format("'{}' is not a part of a checkpoint{}; allowed: model, optimizer, extra, hf_model",
                           entry, near.empty() ? std::string() : fmt::format(", did you mean '{}'?", near)));
    }
  }
  if (contents.optimizer && !contents.model)
    keys.fail(key, "optimizer state without the masters it belongs to is of no use: add model");
  if (saves && contents.extra && !contents.model)
    keys.fail(key, "extra is a part of our own files: add model");
  return contents;
}

EngineCheckpointConfig read_checkpoint(ConfigKeys keys) {
  EngineCheckpointConfig checkpoint;
  checkpoint.save = read_contents(keys, "save_contents", true);
  checkpoint.load =
      keys.find("load_contents") ? read_contents(keys, "load_contents", false) : checkpoint.save;
  keys.only("async_save", {false}, "save_checkpoint returns when the checkpoint is on disk; allowed: false");
  keys.no_effect("strict", true, "loading is always strict");
  keys.no_effect("save_lora_only", false, "there are no adapters in this version");
  keys.finish();
  return checkpoint;
}

}  // namespace

EngineConfig EngineConfig::from_json(const Json& json, const std::string& source) {
  if (!json.is_object()) throw BadConfig("{}: not a JSON object", source);
  const std::vector<std::string> sections = {"model", "engine", "optimizer", "checkpoint"};
  for (const auto& [section, value] : json.items()) {
    if (std::find(sections.begin(), sections.end(), section) != sections.end()) continue;
    const std::string near = nearest(section, sections);
    throw BadConfig("{}: unknown section '{}'{}; allowed: model, engine, optimizer, checkpoint", source,
                    section, near.empty() ? std::string() : fmt::format(", did you mean '{}'?", near));
  }
  EngineConfig config;
  const auto keys = [&](const char* section) { return ConfigKeys(json, section, source, config.notes); };
  config.model = read_model(keys("model"));
  config.engine = read_engine(keys("engine"));
  config.optimizer = read_optimizer(keys("optimizer"));
  config.checkpoint = read_checkpoint(keys("checkpoint"));
  for (const auto& [section, settings] : json.items()) {
    for (const auto& [key, value] : settings.items()) {
      if (key.find("path") == std::string::npos)
        config.compared += fmt::format("{}.{} = {}\n", section, key, value.dump());
    }
  }
  return config;
}

LrFactor EngineOptimizerConfig::schedule() const {
  const bool needs_total =
      torchtitan_rule || decay != LrDecay::kConstant || (lr_warmup_steps <= 0 && lr_warmup_steps_ratio > 0);
  if (needs_total && total_training_steps < 1) {
    throw BadConfig(
        "optimizer.total_training_steps = {}: the learning-rate schedule needs a number >= 1 when the engine "
        "is initialized",
        total_training_steps);
  }
  LrScheduleOptions options;
  options.total_steps = std::max<int64_t>(1, total_training_steps);
  options.warmup_steps =
      lr_warmup_steps > 0
          ? lr_warmup_steps
          : static_cast<int64_t>(lr_warmup_steps_ratio * static_cast<double>(options.total_steps));
  options.decay = decay;
  options.min_lr_factor = min_lr_factor;
  options.cycles = num_cycles;
  return torchtitan_rule ? torchtitan_schedule(options)
                         : verl_schedule(options, zero_indexed_step || decay == LrDecay::kConstant);
}

}  // namespace titanium
