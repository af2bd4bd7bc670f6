#include "titanium/engine/engine_config.h"

#include <gtest/gtest.h>

#include <map>
#include <tuple>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// verl 0.9.1, trainer/config/engine/torchtitan.yaml.
const char* kTorchtitanEngine = R"({
  "_target_": "verl.workers.config.TorchtitanEngineConfig", "param_offload": false, "optimizer_offload": false,
  "wrap_policy": {"min_num_params": 0}, "reshard_after_forward": "default", "forward_prefetch": false,
  "use_orig_params": false, "mixed_precision": false, "use_torch_compile": true,
  "entropy_from_logits_with_chunking": false, "entropy_from_logits_chunk_size": 2048,
  "entropy_checkpointing": false, "data_parallel_size": 1, "data_parallel_replicate_size": 1,
  "data_parallel_shard_size": 1, "tensor_parallel_size": 1, "expert_parallel_size": 1,
  "pipeline_parallel_size": 1, "context_parallel_size": 1, "attn_type": "flex", "spmd_backend": "spmd_types",
  "activation_checkpoint": "selective", "max_seq_len": null, "strategy": "torchtitan", "seed": 42,
  "full_determinism": false, "forward_only": false, "dtype": "bfloat16"})";
// The fields of EngineConfig and TorchtitanEngineConfig that the yaml leaves out.
const char* kMoreEngine = R"({
  "offload_policy": false, "expert_tensor_parallel_size": 1, "use_dynamic_bsz": true,
  "max_token_len_per_gpu": null, "micro_batch_size_per_gpu": null, "infer_max_token_len_per_gpu": null,
  "infer_micro_batch_size_per_gpu": null, "use_fused_kernels": false, "use_remove_padding": true,
  "router_replay": {"mode": "disabled"}})";
// optim/fsdp.yaml, optim/torchtitan.yaml.
const char* kFsdpOptimizer = R"({
  "_target_": "verl.workers.config.FSDPOptimizerConfig", "optimizer": "AdamW", "optimizer_impl": "torch.optim",
  "lr": 1e-3, "lr_warmup_steps_ratio": 0.0, "total_training_steps": -1, "weight_decay": 0.01,
  "lr_warmup_steps": -1, "betas": [0.9, 0.999], "clip_grad": 1.0, "min_lr_ratio": 0.0, "num_cycles": 0.5,
  "lr_scheduler_type": "constant", "zero_indexed_step": true, "warmup_style": null,
  "override_optimizer_config": null})";
const char* kTorchtitanOptimizer = R"({
  "_target_": "verl.workers.config.TorchtitanOptimizerConfig", "name": "AdamW", "lr": 1e-3,
  "lr_warmup_steps_ratio": 0.0, "total_training_steps": -1, "weight_decay": 0.01, "lr_warmup_steps": -1,
  "betas": [0.9, 0.999], "clip_grad": 1.0, "eps": 1e-8, "decay_type": "linear", "min_lr_factor": 0.0})";

Json object(const std::string& key, const Json& value) {
  Json json = Json::object();
  json[key] = value;
  return json;
}
Json list(std::initializer_list<const char*> entries) {
  Json json = Json::array();
  for (const char* entry : entries) json.push_back(entry);
  return json;
}
Json base() {
  return object("model", object("path", "/models/tiny"));
}
EngineConfig with(const std::string& section, const std::string& key, const Json& value) {
  Json json = base();
  json[section][key] = value;
  return EngineConfig::from_json(json);
}
std::string refusal(const std::string& section, const std::string& key, const Json& value) {
  try {
    with(section, key, value);
  } catch (const BadConfig& e) {
    return e.what();
  }
  return "";
}

TEST(EngineConfig, EveryKeyOfVerlsGroupsIsKnownAndItsDefaultsLeaveNoNote) {
  for (const char* optimizer : {kFsdpOptimizer, kTorchtitanOptimizer}) {
    Json json = base();
    json["engine"] = Json::parse(kTorchtitanEngine);
    json["engine"].update(Json::parse(kMoreEngine));
    json["optimizer"] = Json::parse(optimizer);
    json["checkpoint"] =
        Json::parse(R"({"save_contents": ["model", "optimizer", "extra"], "async_save": false,
      "load_contents": ["model", "optimizer", "extra"], "strict": true, "save_lora_only": false})");
    const EngineConfig config = EngineConfig::from_json(json);
    EXPECT_TRUE(config.notes.empty());
    EXPECT_EQ(config.engine.dtype, Dtype::BF16);
    EXPECT_EQ(config.engine.model_dtype, Dtype::F32);
    EXPECT_EQ(config.engine.activation_checkpoint, "selective");
    EXPECT_EQ(config.optimizer.lr, 1e-3);
    EXPECT_EQ(config.optimizer.beta2, 0.999);
    EXPECT_EQ(config.optimizer.eps, 1e-8);
    EXPECT_EQ(config.optimizer.torchtitan_rule, optimizer == kTorchtitanOptimizer);
    EXPECT_EQ(config.optimizer.decay,
              optimizer == kTorchtitanOptimizer ? LrDecay::kLinear : LrDecay::kConstant);
  }
}

TEST(EngineConfig, ValuesAreRead) {
  const EngineConfig config = EngineConfig::from_json(Json::parse(R"({
    "model": {"path": "a", "local_path": "/b", "freeze": "lm_head.*", "override_config": {"rope_theta": 5}},
    "engine": {"param_offload": true, "optimizer_offload": true, "forward_only": true, "seed": 7, "dtype": "float32",
      "activation_checkpoint": "full", "max_seq_len": 99, "use_dynamic_bsz": false, "max_token_len_per_gpu": 10,
      "micro_batch_size_per_gpu": 2, "infer_max_token_len_per_gpu": 30, "infer_micro_batch_size_per_gpu": 4,
      "reshard_after_forward": "always", "forward_prefetch": true, "pipeline_parallel_size": 4,
      "pipeline_parallel_schedule": "GPipe", "pipeline_parallel_schedule_csv": null,
      "pipeline_parallel_layers_per_stage": 3, "pipeline_parallel_first_stage_less_layers": 0},
    "optimizer": {"lr": 2, "betas": [0.5, 0.6], "clip_grad": 3, "weight_decay": 0,
      "override_optimizer_config": {"eps": 1e-6, "fused": true}},
    "checkpoint": {"save_contents": ["hf_model"]}})"));
  EXPECT_EQ(config.model.path, "/b");
  EXPECT_EQ(config.model.freeze, std::vector<std::string>{"lm_head.*"});
  EXPECT_EQ(config.model.override_config, object("rope_theta", 5));
  EXPECT_TRUE(config.engine.param_offload && config.engine.optimizer_offload && config.engine.forward_only);
  EXPECT_FALSE(config.engine.use_dynamic_bsz);
  EXPECT_TRUE(config.engine.forward_prefetch);
  EXPECT_EQ(config.engine.dims.pp, 4);
  EXPECT_EQ(config.engine.pipeline.schedule, "GPipe");
  EXPECT_EQ(config.engine.pipeline.schedule_csv, "");
  EXPECT_EQ(config.engine.pipeline.layers_per_stage, 3);
  EXPECT_EQ(config.engine.pipeline.first_less_layers, 0);
  EXPECT_EQ(config.engine.pipeline.last_less_layers, -1);
  EXPECT_EQ(config.engine.seed, 7u);
  EXPECT_EQ(config.engine.dtype, Dtype::F32);
  EXPECT_EQ(config.engine.reshard_after_forward, "always");
  EXPECT_EQ(config.engine.activation_checkpoint, "full");
  EXPECT_EQ(config.engine.max_seq_len, 99);
  EXPECT_EQ(config.engine.max_token_len_per_gpu, 10);
  EXPECT_EQ(config.engine.micro_batch_size_per_gpu, 2);
  EXPECT_EQ(config.engine.infer_max_token_len_per_gpu, 30);
  EXPECT_EQ(config.engine.infer_micro_batch_size_per_gpu, 4);
  EXPECT_EQ(config.optimizer.lr, 2);
  EXPECT_EQ(config.optimizer.beta1, 0.5);
  EXPECT_EQ(config.optimizer.beta2, 0.6);
  EXPECT_EQ(config.optimizer.clip_grad, 3);
  EXPECT_EQ(config.optimizer.weight_decay, 0);
  EXPECT_EQ(config.optimizer.eps, 1e-6);
  EXPECT_TRUE(config.checkpoint.save.hf_model && config.checkpoint.load.hf_model);
  EXPECT_FALSE(config.checkpoint.save.model || config.checkpoint.save.optimizer ||
               config.checkpoint.load.extra);
}

// The defaults of [parallelism] in a run file can be said here too.
TEST(EngineConfig, WhatIsNotGivenCanBeSaid) {
  for (const auto& [key, value] : std::map<std::string, int>{
           {"layers_per_stage", 0}, {"first_stage_less_layers", -1}, {"last_stage_less_layers", -1}}) {
    EXPECT_EQ(refusal("engine", "pipeline_parallel_" + key, value), "");
    EXPECT_NE(refusal("engine", "pipeline_parallel_" + key, value - 1)
                  .find(fmt::format("allowed: an integer >= {}", value)),
              std::string::npos);
  }
}

TEST(EngineConfig, Precision) {
  EXPECT_EQ(with("engine", "dtype", "float64").engine.model_dtype, Dtype::F64);
  EXPECT_EQ(with("engine", "dtype", "float64").engine.reduce_dtype, Dtype::F64);
  EXPECT_EQ(with("engine", "model_dtype", "bf16").engine.model_dtype, Dtype::BF16);
  const Json fp32 = Json::parse(R"({"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"})");
  EXPECT_EQ(with("engine", "mixed_precision", fp32).engine.dtype, Dtype::F32);
  EXPECT_NE(refusal("engine", "dtype", "float16").find("loss scaler"), std::string::npos);
  EXPECT_NE(refusal("engine", "dtype", "int8").find("allowed: bfloat16, float32, float64"),
            std::string::npos);
  EXPECT_NE(refusal("engine", "mixed_precision", object("reduce_dtype", "bf16")).find("summed in float32"),
            std::string::npos);
}

TEST(EngineConfig, AnUnknownKeyComesWithTheNearest) {
  EXPECT_EQ(
      refusal("engine", "max_token_len_per_gup", 5),
      "engine config: engine has no key 'max_token_len_per_gup'; did you mean 'max_token_len_per_gpu'?");
  EXPECT_EQ(refusal("optimizer", "weight_decy", 0),
            "engine config: optimizer has no key 'weight_decy'; did you mean 'weight_decay'?");
  EXPECT_EQ(refusal("optimiser", "lr", 0),
            "engine config: unknown section 'optimiser', did you mean 'optimizer'?; allowed: model, engine, "
            "optimizer, checkpoint");
  EXPECT_NE(
      refusal("checkpoint", "save_contents", list({"model", "optimiser"})).find("did you mean 'optimizer'?"),
      std::string::npos);
}

TEST(EngineConfig, WhatItCannotDoIsRefusedByNameWithAReason) {
  const std::vector<std::tuple<std::string, std::string, std::string, std::string>> table = {
      {"model", "path", "null", "folder"},
      {"model", "lora_rank", "8", "no adapters"},
      {"model", "lora", R"({"rank": 4})", "no adapters"},
      {"model", "enable_activation_offload", "true", "activation_checkpoint"},
      {"model", "override_config", "3", "object"},
      {"model", "mtp", R"({"enable": true})", "multi-token"},
      {"engine", "offload_policy", "true", "param_offload"},
      {"engine", "param_offload", "\"yes\"", "true, false"},
      {"engine", "seed", "-1", ">= 0"},
      {"engine", "seed", "1.5", "integer"},
      {"engine", "attn_type", "\"xformers\"", "varlen"},
      {"engine", "spmd_backend", "\"mine\"", "default"},
      {"engine", "activation_checkpoint", "\"some\"", "selective, full, none"},
      {"engine", "reshard_after_forward", "true", "string"},
      {"engine", "strategy", "\"fsdp\"", "titanium"},
      {"engine", "data_parallel_size", "3", "is 1"},
      {"engine", "expert_tensor_parallel_size", "2", "experts"},
      {"engine", "router_replay", R"({"mode": "R2"})", "router"},
      {"engine", "max_seq_len", "0", ">= 1"},
      {"engine", "wrap_policy", "1", "object"},
      {"optimizer", "optimizer", "\"Adam\"", "not decoupled"},
      {"optimizer", "name", "\"Lion\"", "AdamW, SGD"},
      {"optimizer", "optimizer_impl", "\"torchao.optim\"", "torch.optim"},
      {"optimizer", "lr", "-1", ">= 0"},
      {"optimizer", "eps", "0", "> 0"},
      {"optimizer", "betas", "[0.9, 1.0]", "[0, 1)"},
      {"optimizer", "betas", "[0.9]", "two numbers"},
      {"optimizer", "lr_warmup_steps_ratio", "1.5", "[0, 1]"},
      {"optimizer", "lr_scheduler_type", "\"linear\"", "constant, cosine"},
      {"optimizer", "decay_type", "\"constant\"", "linear, sqrt, cosine"},
      {"optimizer", "override_optimizer_config", R"({"amsgrad": true})", "amsgrad"},
      {"checkpoint", "async_save", "true", "on disk"},
      {"checkpoint", "save_contents", R"(["optimizer"])", "add model"},
      {"checkpoint", "save_contents", R"(["hf_model", "extra"])", "add model"},
      {"checkpoint", "load_contents", "3", "list"},
  };
  for (const auto& [section, key, value, reason] : table) {
    const std::string text = refusal(section, key, Json::parse(value));
    EXPECT_NE(text.find(section + "." + key), std::string::npos) << section << "." << key << ": " << text;
    EXPECT_NE(text.find(reason), std::string::npos) << section << "." << key << ": " << text;
  }
}

TEST(EngineConfig, KeysThatChangeNothingLeaveANote) {
  const EngineConfig config = with("engine", "use_torch_compile", false);
  ASSERT_EQ(config.notes.size(), 1u);
  EXPECT_EQ(
      config.notes[0],
      "engine.use_torch_compile = false changes nothing: there is no graph compiler; the kernels are fused "
      "by hand");
}

TEST(EngineConfig, OldNamesOfVerlStillCount) {
  EXPECT_EQ(with("optimizer", "grad_clip", 0.5).optimizer.clip_grad, 0.5);
  EXPECT_EQ(with("optimizer", "warmup_style", "cosine").optimizer.decay, LrDecay::kCosine);
}

// verl: i / w in the warm-up, so 0 first; then max(min, (1 + min) / 2 + (1 - min) / 2 cos(2 pi cycles x)).
TEST(EngineSchedule, VerlsRule) {
  EngineOptimizerConfig o = with("optimizer", "lr_scheduler_type", "cosine").optimizer;
  o.total_training_steps = 10;
  o.lr_warmup_steps_ratio = 0.25;  // int(2.5) = 2
  o.min_lr_factor = 0.1;
  const LrFactor half = o.schedule();
  EXPECT_EQ(half(0), 0);
  EXPECT_EQ(half(1), 0.5);
  EXPECT_EQ(half(2), 1);
  EXPECT_NEAR(half(6), 0.55, 1e-12);
  EXPECT_NEAR(half(10), 0.1, 1e-12);
  o.num_cycles = 1;
  EXPECT_NEAR(o.schedule()(6), 0.1, 1e-12);
  EXPECT_NEAR(o.schedule()(10), 1, 1e-12);
  o.zero_indexed_step = false;
  EXPECT_NEAR(o.schedule()(9), 1, 1e-12);
  o.decay = LrDecay::kConstant;  // which knows no zero_indexed_step
  EXPECT_EQ(o.schedule()(0), 0);
  EXPECT_EQ(o.schedule()(9), 1);
  o.lr_warmup_steps = 4;  // before the ratio
  EXPECT_EQ(o.schedule()(2), 0.5);
}

TEST(EngineSchedule, TorchtitansRule) {
  EngineOptimizerConfig o = with("optimizer", "decay_type", "linear").optimizer;
  o.total_training_steps = 10;
  o.lr_warmup_steps = 2;
  EXPECT_EQ(o.schedule()(0), 0.5);
  EXPECT_EQ(o.schedule()(1), 1);
  EXPECT_LT(o.schedule()(9), 0.2);
  EXPECT_GT(o.schedule()(9), 0);
}

TEST(EngineSchedule, TheTotalIsNeededWhereTheRuleUsesIt) {
  EXPECT_EQ(with("optimizer", "lr", 1).optimizer.schedule()(1000), 1);
  EXPECT_THROW(with("optimizer", "lr_scheduler_type", "cosine").optimizer.schedule(), BadConfig);
  EXPECT_THROW(with("optimizer", "decay_type", "sqrt").optimizer.schedule(), BadConfig);
  EXPECT_THROW(with("optimizer", "lr_warmup_steps_ratio", 0.1).optimizer.schedule(), BadConfig);
  Json both = base();
  both["optimizer"] = Json::parse(R"({"decay_type": "linear", "lr_scheduler_type": "constant"})");
  EXPECT_THROW(EngineConfig::from_json(both), BadConfig);
}

}  // namespace
}  // namespace titanium
