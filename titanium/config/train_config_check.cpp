// Keys against each other.
#include "titanium/base/error.h"
#include "titanium/config/train_config_fields.h"

namespace titanium {
namespace {

void check_batch(const TrainingConfig& t) {
  const bool sequences = t.global_batch_size > 0, tokens = t.global_batch_tokens > 0;
  if (sequences == tokens) {
    throw BadConfig(
        "training.global_batch_size = {} and training.global_batch_tokens = {}: one of them says how large a "
        "step is; "
        "the other is -1",
        t.global_batch_size, t.global_batch_tokens);
  }
  if (t.seq_len > t.max_tokens_per_microbatch) {
    throw BadConfig(
        "training.seq_len = {}, training.max_tokens_per_microbatch = {}: a micro-batch must hold the longest "
        "sequence",
        t.seq_len, t.max_tokens_per_microbatch);
  }
  if (tokens && t.seq_len > t.global_batch_tokens) {
    throw BadConfig(
        "training.seq_len = {}, training.global_batch_tokens = {}: a step must hold the longest sequence",
        t.seq_len, t.global_batch_tokens);
  }
}

void check_numbers(const TrainingConfig& t) {
  if (t.loss_agg_mode == "seq-mean-token-sum-norm" && t.loss_scale_factor <= 0) {
    throw BadConfig(
        "training.loss_agg_mode = seq-mean-token-sum-norm, training.loss_scale_factor = {}: allowed: a "
        "number > 0",
        t.loss_scale_factor);
  }
  if (t.mixed_precision_param == Dtype::F64 && t.mixed_precision_reduce != Dtype::F64) {
    throw BadConfig(
        "training.mixed_precision_param = float64, training.mixed_precision_reduce = {}: gradients of a "
        "float64 "
        "computation are reduced in float64",
        torch_name(t.mixed_precision_reduce));
  }
  if (t.mixed_precision_param != Dtype::F64 && t.mixed_precision_reduce == Dtype::F64) {
    throw BadConfig(
        "training.mixed_precision_reduce = float64, training.mixed_precision_param = {}: gradients of this "
        "computation are formed in float32; allowed: float32, or float64 for both",
        torch_name(t.mixed_precision_param));
  }
}

void check_optimizer(const TrainConfig& c) {
  if (c.optimizer.state_dtype == Dtype::F64 && c.training.dtype != Dtype::F64) {
    throw BadConfig(
        "optimizer.state_dtype = float64, training.dtype = {}: float64 state needs float64 parameters",
        torch_name(c.training.dtype));
  }
  if (c.optimizer.state_dtype == Dtype::BF16 && c.training.dtype == Dtype::F64) {
    throw BadConfig("optimizer.state_dtype = bfloat16, training.dtype = float64: allowed: float64");
  }
}

// `run` says where the number of updates comes from: "training.steps = 5".
void check_schedule(const LRSchedulerConfig& s, int64_t steps, const std::string& run) {
  if (s.total_steps > 0 && steps > s.total_steps) {
    throw BadConfig("lr_scheduler.total_steps = {}, {}: the schedule must not end before the run",
                    s.total_steps, run);
  }
  const int64_t whole = s.total_steps > 0 ? s.total_steps : steps;
  if (whole > 0 && s.warmup_steps > whole) {
    throw BadConfig("lr_scheduler.warmup_steps = {}, {}: the warm-up must not be longer", s.warmup_steps,
                    s.total_steps > 0 ? fmt::format("lr_scheduler.total_steps = {}", whole) : run);
  }
}

void check_loading(const CheckpointConfig& k) {
  if (k.load_step >= 0 && k.resume == "never") {
    throw BadConfig("checkpoint.load_step = {}, checkpoint.resume = never: they contradict each other",
                    k.load_step);
  }
  if (k.resume == "require" && !k.enable) {
    throw BadConfig(
        "checkpoint.resume = require, checkpoint.enable = false: a run without checkpoints does not resume");
  }
  if (!k.initial_load_model_only && k.initial_load_path.empty()) {
    throw BadConfig(
        "checkpoint.initial_load_model_only = false needs checkpoint.initial_load_path, a titanium "
        "checkpoint");
  }
  if (!k.initial_load_model_only && k.initial_load_in_hf) {
    throw BadConfig(
        "checkpoint.initial_load_model_only = false, checkpoint.initial_load_in_hf = true: a Hugging Face "
        "folder holds "
        "weights alone");
  }
}

// What a run writes must not be one thing inside another.
void check_outputs(const TrainConfig& c) {
  std::vector<std::pair<std::string, std::filesystem::path>> outputs;
  const auto add = [&](bool used, const char* key, const std::string& path) {
    if (used && !path.empty())
      outputs.emplace_back(key, (std::filesystem::path(path) / "").lexically_normal());
  };
  add(c.checkpoint.enable, "checkpoint.folder", c.checkpoint.folder);
  add(c.checkpoint.last_save_in_hf, "checkpoint.export_folder", c.checkpoint.export_folder);
  add(true, "metrics.jsonl_file", c.metrics.jsonl_file);
  add(c.metrics.enable_tensorboard, "metrics.save_tb_folder", c.metrics.save_tb_folder);
  for (const auto& [key, path] : outputs) {
    for (const auto& [other_key, other] : outputs) {
      if (key != other_key && other.string().starts_with(path.string())) {
        throw BadConfig("{} = {}, {} = {}: one is inside the other, or they are the same", key,
                        path.parent_path().string(), other_key, other.parent_path().string());
      }
    }
  }
}

}  // namespace

void check_together(const TrainConfig& config) {
  check_batch(config.training);
  check_numbers(config.training);
  check_optimizer(config);
  check_schedule(config.lr_scheduler, config.training.steps,
                 fmt::format("training.steps = {}", config.training.steps));
  check_loading(config.checkpoint);
  check_outputs(config);
  if (!config.data.validation_path.empty() && config.data.validation_split > 0) {
    throw BadConfig("data.validation_path and data.validation_split = {}: give one of them",
                    config.data.validation_split);
  }
}

void check_schedule(const TrainConfig& config, int64_t steps) {
  check_schedule(config.lr_scheduler, steps,
                 config.training.steps > 0
                     ? fmt::format("training.steps = {}", steps)
                     : fmt::format("data.epochs = {} gives {} steps", config.data.epochs, steps));
}

void check_model(const TrainConfig& config) {
  if (config.model.path.empty()) {
    throw BadConfig(
        "model.path is missing: a Hugging Face folder (config.json, safetensors, tokenizer.json)");
  }
}

void check_complete(const TrainConfig& config) {
  check_model(config);
  if (config.data.path.empty()) throw BadConfig("data.path is missing: one or more JSONL files");
}

std::vector<std::string> keys_without_effect(const TrainConfig& c) {
  const TrainConfig defaults;
  const auto given = config_values(c), usual = config_values(defaults);
  std::vector<std::string> out;
  const auto unless = [&](bool read, const std::vector<std::string>& keys, const std::string& because) {
    for (const std::string& key : keys) {
      if (!read && given.at(key) != usual.at(key)) {
        out.push_back(fmt::format("{} = {} has no effect: {}", key, given.at(key), because));
      }
    }
  };
  const bool adamw = c.optimizer.name == "AdamW";
  unless(c.training.loss_agg_mode == "seq-mean-token-sum-norm", {"training.loss_scale_factor"},
         fmt::format("training.loss_agg_mode is {}", c.training.loss_agg_mode));
  unless(adamw, {"optimizer.beta1", "optimizer.beta2", "optimizer.eps"}, "optimizer.name is SGD");
  unless(!adamw, {"optimizer.momentum"}, "optimizer.name is AdamW");
  unless(c.training.steps <= 0, {"data.epochs", "data.last_batch"}, "training.steps says where the run ends");
  const bool wsd = c.lr_scheduler.decay_type == "wsd", constant = c.lr_scheduler.decay_type == "constant";
  const std::string decay = fmt::format("lr_scheduler.decay_type is {}", c.lr_scheduler.decay_type);
  unless(wsd, {"lr_scheduler.stable_ratio"}, decay);
  unless(!wsd && !constant, {"lr_scheduler.decay_ratio"}, decay);
  unless(!constant, {"lr_scheduler.min_lr_factor"}, decay);
  unless(c.activation_checkpoint.mode == "selective", {"activation_checkpoint.selective_ac_option"},
         fmt::format("activation_checkpoint.mode is {}", c.activation_checkpoint.mode));
  const std::string pipeline = "parallelism.pipeline_parallel_";
  const bool stages = c.parallelism.pipeline_parallel_degree > 1;
  unless(stages,
         {pipeline + "schedule", pipeline + "schedule_csv", pipeline + "layers_per_stage",
          pipeline + "first_stage_less_layers", pipeline + "last_stage_less_layers"},
         pipeline + "degree is 1");
  unless(!stages || c.parallelism.pipeline_parallel_schedule_csv.empty(),
         {pipeline + "schedule", pipeline + "layers_per_stage"},
         pipeline + "schedule_csv says what the stages are");
  unless(c.checkpoint.last_save_in_hf, {"checkpoint.export_folder", "checkpoint.export_dtype"},
         "checkpoint.last_save_in_hf is false");
  if (!c.validator.enable && c.data.validation_split > 0) {
    out.push_back(fmt::format(
        "data.validation_split = {} keeps records out of training for nothing: validator.enable is false",
        given.at("data.validation_split")));
  }
  return out;
}

}  // namespace titanium
