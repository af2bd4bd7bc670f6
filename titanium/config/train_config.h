// Every knob of `titanium train run.toml`: sections and key names are torchtitan 0.3.0's where it has them.
//
// The table in train_config_fields.cpp is the only place that knows key names, texts and ranges: parsing,
// overrides, --print-config, --help and docs/config.md all come from it.  To add a key: a member here, a line
// there.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "titanium/formats/dtype.h"

namespace titanium {

struct ModelSection {
  std::string path;
  std::vector<std::string> freeze;
};

struct TrainingConfig {
  int64_t seed = 42;
  int64_t steps = -1;
  int64_t global_batch_size = 8;
  int64_t global_batch_tokens = -1;
  int64_t max_tokens_per_microbatch = 4096;
  int64_t seq_len = 2048;
  double max_norm = 1.0;
  Dtype dtype = Dtype::F32;
  Dtype mixed_precision_param = Dtype::BF16;
  Dtype mixed_precision_reduce = Dtype::F32;
  std::string loss_agg_mode = "token-mean";
  double loss_scale_factor = 0;
  std::string head_rows = "weighted";
  int64_t threads = 0;
  bool enable_cpu_offload = false;
};

struct DataConfig {
  std::vector<std::string> path;
  std::string format = "auto";
  int64_t epochs = 1;
  bool shuffle = true;
  std::string last_batch = "drop";
  std::vector<std::string> validation_path;
  double validation_split = 0;
  std::string on_bad_record = "fail";
  std::string on_long_record = "fail";
  bool mask_trailing_newline = false;
  bool mask_last_turn_only = false;
  std::string chat_template;
  bool add_eos = true;
};

struct OptimizerConfig {
  std::string name = "AdamW";
  double lr = 1e-5;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double momentum = 0;
  bool decay_norms_and_biases = true;
  Dtype state_dtype = Dtype::F32;
};

struct LRSchedulerConfig {
  int64_t warmup_steps = 0;
  int64_t total_steps = -1;
  std::string decay_type = "linear";
  double decay_ratio = -1;
  double stable_ratio = 0.9;
  double min_lr_factor = 0;
};

struct CheckpointConfig {
  bool enable = true;
  std::string folder = "checkpoint";
  int64_t interval = 500;
  int64_t keep_latest_k = 10;
  std::string async_mode = "async";
  std::string resume = "auto";
  int64_t load_step = -1;
  std::string initial_load_path;
  bool initial_load_model_only = true;
  bool initial_load_in_hf = true;
  bool last_save_in_hf = true;
  std::string export_folder = "hf";
  Dtype export_dtype = Dtype::BF16;
};

struct ActivationCheckpointConfig {
  std::string mode = "selective";
  std::string selective_ac_option = "op";  // "op", or every n-th block as a number
};

struct ParallelismConfig {
  int64_t data_parallel_replicate_degree = 1;
  int64_t data_parallel_shard_degree = -1;
  int64_t tensor_parallel_degree = 1;
  int64_t pipeline_parallel_degree = 1;
  int64_t context_parallel_degree = 1;
  int64_t expert_parallel_degree = 1;
  std::string fsdp_reshard_after_forward = "default";
  std::string fsdp_reduce = "last";
  std::string pipeline_parallel_schedule = "1F1B";
  std::string pipeline_parallel_schedule_csv;
  int64_t pipeline_parallel_layers_per_stage = 0;
  int64_t pipeline_parallel_first_stage_less_layers = -1;
  int64_t pipeline_parallel_last_stage_less_layers = -1;
};

struct MetricsConfig {
  int64_t log_freq = 1;
  std::string jsonl_file = "metrics.jsonl";
  bool enable_tensorboard = false;
  std::string save_tb_folder = "tb";
};

struct ValidatorConfig {
  bool enable = true;
  int64_t freq = 100;
  int64_t steps = -1;
};

struct CommConfig {
  std::string transport = "auto";
  int64_t init_timeout_seconds = 300;
  int64_t train_timeout_seconds = 100;
};

struct TrainConfig {
  std::string dump_folder = "./outputs";
  ModelSection model;
  TrainingConfig training;
  DataConfig data;
  OptimizerConfig optimizer;
  LRSchedulerConfig lr_scheduler;
  CheckpointConfig checkpoint;
  ActivationCheckpointConfig activation_checkpoint;
  ParallelismConfig parallelism;
  MetricsConfig metrics;
  ValidatorConfig validator;
  CommConfig comm;
};

// Defaults, then the file where there is one, then the overrides in order ("--section.key=value"; the dashes
// may be left out).  Every key is checked by itself where it is given, then the keys against each other.
// BadConfig: "run.toml:12: [optimizer] lr = -1: allowed: a number > 0", or the override in front.
TrainConfig load_train_config(const std::optional<std::filesystem::path>& file,
                              const std::vector<std::string>& overrides = {});
// The same from the text of a file; `source` is what messages call it.
TrainConfig parse_train_config(std::string_view toml, const std::string& source,
                               const std::vector<std::string>& overrides = {});

// Keys that have no default and that training needs (model.path, data.path).  BadConfig names it.
void check_complete(const TrainConfig& config);
void check_model(const TrainConfig& config);  // model.path alone

// The schedule against the number of updates where data.epochs gives it, which parsing cannot know.
// BadConfig.
void check_schedule(const TrainConfig& config, int64_t steps);

// A sentence for each key that was given a value and that nothing reads because of another key.
std::vector<std::string> keys_without_effect(const TrainConfig& config);

// Every key, "section.key", and its value as TOML.
std::map<std::string, std::string> config_values(const TrainConfig& config);

// TOML with every key; parse_train_config gives the same config from it, to the last bit.
std::string print_train_config(const TrainConfig& config);

std::string config_help();      // for a terminal: every key, default, allowed values, one line of text
std::string config_markdown();  // docs/config.md

}  // namespace titanium
