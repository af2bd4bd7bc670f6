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
}

void check_optimizer(const TrainConfig& c) {
  if (c.optimizer.state_dtype == Dtype::F64 && c.training.dtype != Dtype::F64) {
    throw BadConfig(
        "optimizer.state_dtype = float64, training.dtype = {}: float64 state needs float64 parameters",
        torch_name(c.training.dtype));
  }
}

void check_schedule(const TrainConfig& c) {
  const LRSchedulerConfig& s = c.lr_scheduler;
  if (s.total_steps > 0 && c.training.steps > s.total_steps) {
    throw BadConfig(
        "lr_scheduler.total_steps = {}, training.steps = {}: the schedule must not end before the run",
        s.total_steps, c.training.steps);
  }
  const bool own = s.total_steps > 0;
  const int64_t steps = own ? s.total_steps : c.training.steps;
  if (steps > 0 && s.warmup_steps > steps) {
    throw BadConfig("lr_scheduler.warmup_steps = {}, {} = {}: the warm-up must not be longer", s.warmup_steps,
                    own ? "lr_scheduler.total_steps" : "training.steps", steps);
  }
}

void check_loading(const CheckpointConfig& k) {
  if (k.load_step >= 0 && k.resume == "never") {
    throw BadConfig("checkpoint.load_step = {}, checkpoint.resume = never: they contradict each other",
                    k.load_step);
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

}  // namespace

void check_together(const TrainConfig& config) {
  check_batch(config.training);
  check_numbers(config.training);
  check_optimizer(config);
  check_schedule(config);
  check_loading(config.checkpoint);
  if (!config.data.validation_path.empty() && config.data.validation_split > 0) {
    throw BadConfig("data.validation_path and data.validation_split = {}: give one of them",
                    config.data.validation_split);
  }
}

void check_complete(const TrainConfig& config) {
  if (config.model.path.empty()) {
    throw BadConfig(
        "model.path is missing: a Hugging Face folder (config.json, safetensors, tokenizer.json)");
  }
  if (config.data.path.empty()) throw BadConfig("data.path is missing: one or more JSONL files");
}

}  // namespace titanium
