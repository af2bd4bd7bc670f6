// What an engine is made from: the four configs that verl hands to an engine, under verl's key names.
//
//   {"model":      {"path": "/models/Qwen3-0.6B"},
//    "engine":     {"param_offload": false, "use_dynamic_bsz": true, "max_token_len_per_gpu": 8192, ...},
//    "optimizer":  {"lr": 1e-6, "weight_decay": 0.01, "lr_scheduler_type": "constant", ...},
//    "checkpoint": {"save_contents": ["model", "optimizer", "extra"]}}
//
// engine: every key of verl 0.9.1's engine/torchtitan.yaml and of its EngineConfig.  optimizer: those of
// optim/fsdp.yaml and of optim/torchtitan.yaml.  A key either has an effect, or changes no result here and
// leaves a note, or is refused with the reason.  null is the same as absent.  Fields say what differs from
// verl; docs/engine.md lists the keys.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "titanium/config/pipeline_config.h"
#include "titanium/dist/parallel_dims.h"
#include "titanium/formats/dtype.h"
#include "titanium/formats/json.h"
#include "titanium/optim/lr_schedule.h"

namespace titanium {

struct EngineModelConfig {
  std::string path;            // a Hugging Face folder; `local_path` where both are given
  std::string tokenizer_path;  // whose files go into checkpoints; empty: path
  Json override_config;  // an object: keys of config.json, replaced (or added) before the model is built
  std::vector<std::string> freeze;  // names of weights that do not train; * and ? match as in a shell
};

struct EngineRunConfig {
  bool param_offload = false;
  bool optimizer_offload = false;
  bool forward_only = false;  // no optimizer, no gradients
  uint64_t seed = 42;         // of weights that the checkpoint lacks (a value head)

  Dtype dtype = Dtype::BF16;        // of the computation: bfloat16, float32, float64
  Dtype model_dtype = Dtype::F32;   // of the masters: float32, float64, bfloat16
  Dtype reduce_dtype = Dtype::F32;  // of gradients

  ParallelDims dims;  // data_parallel_replicate_size, data_parallel_shard_size, tensor_parallel_size, ...
  PipelineConfig pipeline;  // pipeline_parallel_schedule, ..., as in a run's [parallelism]
  std::string reshard_after_forward = "default";  // default, always, never
  std::string fsdp_reduce = "last";               // last, each_micro_batch
  bool forward_prefetch = false;
  std::string activation_checkpoint = "selective";  // none, selective, full
  int64_t max_seq_len = 0;                          // a longer sample is BadData; 0: any length

  // How batches are cut that do not say it themselves (MicroBatching).
  bool use_dynamic_bsz = true;
  int64_t max_token_len_per_gpu = 0, micro_batch_size_per_gpu = 0;  // training; 0: not given
  int64_t infer_max_token_len_per_gpu = 0,
          infer_micro_batch_size_per_gpu = 0;  // forward only; 0: as training
};

struct EngineOptimizerConfig {
  std::string name = "AdamW";  // AdamW, SGD; `optimizer` in the fsdp group.  Weight decay is on all weights.
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
  double momentum = 0;     // SGD
  double clip_grad = 1.0;  // 0: none

  // verl's rule (optim=fsdp: lr_scheduler_type, min_lr_ratio, num_cycles, zero_indexed_step), or torchtitan's
  // where decay_type is given (optim=torchtitan: decay_type, min_lr_factor).  See optim/lr_schedule.h.
  bool torchtitan_rule = false;
  LrDecay decay = LrDecay::kConstant;
  double min_lr_factor = 0;
  double num_cycles = 0.5;
  bool zero_indexed_step = true;
  int64_t total_training_steps = -1;  // final at BaseEngine::initialize(): see set_total_training_steps
  int64_t lr_warmup_steps = -1;       // <= 0: lr_warmup_steps_ratio of the total, rounded down
  double lr_warmup_steps_ratio = 0;

  // The factor of each update.  BadConfig where the rule needs total_training_steps and they are not there.
  LrFactor schedule() const;
};

// What a checkpoint holds, and what load_checkpoint takes from it.
struct CheckpointContents {
  bool model = true;      // masters
  bool optimizer = true;  // state and param groups; needs model
  bool extra = true;      // the position of the LR schedule; needs model
  bool hf_model = false;  // full weights in huggingface/; on load: from there, where model is not asked for
};

struct EngineCheckpointConfig {
  CheckpointContents save, load;
};

struct EngineConfig {
  EngineModelConfig model;
  EngineRunConfig engine;
  EngineOptimizerConfig optimizer;
  EngineCheckpointConfig checkpoint;
  std::string compared;  // what from_json read, but for folders, in lines: the same on all ranks
  std::vector<std::string>
      notes;  // "engine.use_torch_compile = true: there is no graph compiler": logged once

  // BadConfig names section, key and value: an unknown key (with the nearest one), a wrong type, a value out
  // of range, or one that asks for something this engine does not do.  `source` starts the message.
  static EngineConfig from_json(const Json& json, const std::string& source = "engine config");
};

}  // namespace titanium
