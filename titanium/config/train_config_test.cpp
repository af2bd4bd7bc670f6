#include "titanium/config/train_config.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <set>

#include "titanium/base/error.h"
#include "titanium/config/nearest.h"
#include "titanium/config/train_config_fields.h"
#include "titanium/config/utf8.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

using Strings = std::vector<std::string>;

TrainConfig parse(const std::string& toml, const Strings& overrides = {}) {
  return parse_train_config(toml, "run.toml", overrides);
}

std::string message_of(const std::string& toml, const Strings& overrides = {}) {
  try {
    parse(toml, overrides);
  } catch (const BadConfig& error) {
    return error.what();
  }
  return "no error";
}

void expect_starts(const std::string& message, const std::string& start) {
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
}

TEST(TrainConfig, ReadsAFile) {
  const TrainConfig c = parse(R"(
dump_folder = "out"

[model]
path = "SmolLM2"          # comment

[training]
steps = 300
global_batch_size = 32
max_norm = 1              # an integer is a number too
dtype = "bfloat16"

[data]
path = ["a.jsonl", "b.jsonl"]
validation_path = "v.jsonl"
on_long_record = "truncate"

[optimizer]
lr = 3e-4
decay_norms_and_biases = false

[activation_checkpoint]
mode = "selective"
selective_ac_option = 2
)");
  EXPECT_EQ(c.dump_folder, "out");
  EXPECT_EQ(c.model.path, "SmolLM2");
  EXPECT_EQ(c.training.steps, 300);
  EXPECT_EQ(c.training.global_batch_size, 32);
  EXPECT_EQ(c.training.max_norm, 1.0);
  EXPECT_EQ(c.training.dtype, Dtype::BF16);
  EXPECT_EQ(c.training.seq_len, 2048);
  EXPECT_EQ(c.data.path, (Strings{"a.jsonl", "b.jsonl"}));
  EXPECT_EQ(c.data.validation_path, Strings{"v.jsonl"});
  EXPECT_EQ(c.data.on_long_record, "truncate");
  EXPECT_EQ(c.optimizer.lr, 3e-4);
  EXPECT_FALSE(c.optimizer.decay_norms_and_biases);
  EXPECT_EQ(c.activation_checkpoint.selective_ac_option, "2");
}

TEST(TrainConfig, ErrorsNameFileLineKeyValueAndWhatIsAllowed) {
  EXPECT_EQ(message_of("[optimizer]\n\nlr = -1.0\n"),
            "run.toml:3: [optimizer] lr = -1.0: allowed: a number > 0");
  EXPECT_EQ(message_of("[training]\nsteps = 2.0"),
            "run.toml:2: [training] steps = 2.0: allowed: -1, or an integer from 1 to 1000000000");
  EXPECT_EQ(message_of("[training]\nsteps = \"5\""),
            "run.toml:2: [training] steps = \"5\": allowed: -1, or an integer from 1 to 1000000000");
  EXPECT_EQ(message_of("[data]\nshuffle = 1"), "run.toml:2: [data] shuffle = 1: allowed: true, false");
  EXPECT_EQ(message_of("[data]\npath = [1]"),
            "run.toml:2: [data] path = a list: allowed: a path, or a list of paths");
  EXPECT_EQ(message_of("[data]\npath = [\"\"]"),
            "run.toml:2: [data] path = a list: allowed: a path, or a list of paths");
  EXPECT_EQ(message_of("dump_folder = 5"),
            "run.toml:1: dump_folder = 5: allowed: a string that is not empty");
  EXPECT_EQ(message_of("[optimizer]\nlr = nan"),
            "run.toml:2: [optimizer] lr = nan: allowed: a finite number");
  EXPECT_EQ(message_of("[optimizer]\nlr = 2020-01-01"),
            "run.toml:2: [optimizer] lr = 2020-01-01: allowed: a number > 0");
  EXPECT_EQ(message_of("[training]\ndtype = \"float16\""),
            "run.toml:2: [training] dtype = \"float16\": allowed: float32, bfloat16, float64");
  EXPECT_EQ(message_of("[parallelism]\ncontext_parallel_degree = 2"),
            "run.toml:2: [parallelism] context_parallel_degree = 2: allowed: 1 (in this version)");
  EXPECT_EQ(
      message_of("[activation_checkpoint]\nselective_ac_option = 0"),
      "run.toml:2: [activation_checkpoint] selective_ac_option = 0: allowed: op, or an integer from 1 to "
      "1000000000");
  EXPECT_EQ(message_of("[model]\npath = \"a\\u0000b\""), "run.toml:2: [model] path: holds a NUL character");
  EXPECT_EQ(message_of("training = 3"), "run.toml:1: training is a section: [training]");
  EXPECT_EQ(message_of("[[training]]\nsteps = 3"), "run.toml:1: training is a section: [training]");
  expect_starts(message_of("[training\nsteps = 3"), "run.toml:1: not TOML: ");
  expect_starts(message_of("[training]\nsteps = 3\nsteps = 4"), "run.toml:3: not TOML: ");
  EXPECT_EQ(message_of("\nx = \"\xff\""), "run.toml:2: not UTF-8");
}

// What fits 64 bits but not the place that it goes to.
TEST(TrainConfig, NumbersAreBoundedAbove) {
  EXPECT_EQ(message_of("", {"--training.threads=4294967296"}),
            "--training.threads: [training] threads = \"4294967296\": allowed: an integer from 0 to 1024");
  EXPECT_EQ(
      message_of("[activation_checkpoint]\nselective_ac_option = 99999999999"),
      "run.toml:2: [activation_checkpoint] selective_ac_option = 99999999999: allowed: op, or an integer "
      "from 1 to 1000000000");
  TrainConfig c;
  for (const Section& section : describe(c)) {
    for (const Field& field : section.fields) {
      if (!std::holds_alternative<int64_t*>(field.target) || field.name == "seed") continue;
      EXPECT_FALSE(field.check.ok(std::numeric_limits<int64_t>::max())) << field.name;
      EXPECT_FALSE(field.check.ok(std::numeric_limits<int64_t>::min())) << field.name;
    }
  }
}

TEST(TrainConfig, KeysWithoutEffectAreNamed) {
  EXPECT_TRUE(keys_without_effect(TrainConfig()).empty());
  const auto of = [](const Strings& overrides) { return keys_without_effect(parse("", overrides)); };
  EXPECT_EQ(of({"--optimizer.momentum=0.9"}),
            (Strings{"optimizer.momentum = 0.9 has no effect: optimizer.name is AdamW"}));
  EXPECT_EQ(of({"--optimizer.name=SGD", "--optimizer.momentum=0.9", "--optimizer.beta2=0.9"}),
            (Strings{"optimizer.beta2 = 0.9 has no effect: optimizer.name is SGD"}));
  EXPECT_EQ(
      of({"--training.loss_scale_factor=2"}),
      (Strings{"training.loss_scale_factor = 2.0 has no effect: training.loss_agg_mode is token-mean"}));
  EXPECT_EQ(of({"--training.steps=5", "--data.epochs=2"}),
            (Strings{"data.epochs = 2 has no effect: training.steps says where the run ends"}));
  EXPECT_EQ(of({"--parallelism.pipeline_parallel_schedule=GPipe"}),
            (Strings{"parallelism.pipeline_parallel_schedule = \"GPipe\" has no effect: "
                     "parallelism.pipeline_parallel_degree is 1"}));
  EXPECT_EQ(
      of({"--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule_csv=o.csv",
          "--parallelism.pipeline_parallel_layers_per_stage=2"}),
      (Strings{"parallelism.pipeline_parallel_layers_per_stage = 2 has no effect: "
               "parallelism.pipeline_parallel_schedule_csv says what the stages are"}));
  EXPECT_TRUE(of({"--training.loss_scale_factor=2", "--training.loss_agg_mode=seq-mean-token-sum-norm",
                  "--data.epochs=2"})
                  .empty());
}

TEST(TrainConfig, OutputsStayInDumpFolderAndApart) {
  for (const char* bad : {"--checkpoint.folder=../escape", "--checkpoint.folder=/abs",
                          "--checkpoint.folder=.", "--checkpoint.export_folder=a/../..",
                          "--metrics.jsonl_file=../m.jsonl", "--metrics.save_tb_folder=./"}) {
    EXPECT_NE(message_of("", {bad}).find("allowed: a relative path without .."), std::string::npos)
        << bad << ": " << message_of("", {bad});
  }
  for (const Strings& bad :
       {Strings{"--checkpoint.folder=hf"}, Strings{"--checkpoint.export_folder=checkpoint/hf"},
        Strings{"--metrics.jsonl_file=./hf/"}, Strings{"--metrics.jsonl_file=checkpoint"},
        Strings{"--metrics.enable_tensorboard=true", "--metrics.save_tb_folder=x/../hf"}}) {
    EXPECT_NE(message_of("", bad).find("one is inside the other, or they are the same"), std::string::npos)
        << bad.back() << ": " << message_of("", bad);
  }
  for (const Strings& good : {Strings{"--metrics.jsonl_file="},
                              Strings{"--checkpoint.folder=hf2", "--checkpoint.export_folder=out/hf"},
                              Strings{"--checkpoint.folder=hf", "--checkpoint.last_save_in_hf=false"},
                              Strings{"--metrics.save_tb_folder=hf"}}) {
    EXPECT_EQ(message_of("", good), "no error") << good.back();
  }
}

TEST(TrainConfig, ValuesOfEveryKey) {
  const auto values = config_values(parse("", {"--optimizer.lr=2e-4", "--hf_assets_path=m"}));
  EXPECT_EQ(values.at("optimizer.lr"), "0.0002");
  EXPECT_EQ(values.at("model.path"), "\"m\"");
  EXPECT_EQ(values.at("dump_folder"), "\"./outputs\"");
  EXPECT_EQ(values.count("hf_assets_path"), 0u);
}

TEST(TrainConfig, UnknownKeysNameTheNearest) {
  expect_starts(message_of("[optimizer]\nweigth_decay = 0.1"),
                "run.toml:2: unknown key [optimizer] weigth_decay, did you mean weight_decay?; keys of "
                "[optimizer]: name, lr,");
  expect_starts(message_of("[training]\nlr = 0.1"),
                "run.toml:2: unknown key [training] lr, did you mean optimizer.lr?");
  expect_starts(message_of("[training]\nzzzzzzzzzz = 0.1"),
                "run.toml:2: unknown key [training] zzzzzzzzzz; keys of");
  expect_starts(message_of("[optimiser]\nlr = 0.1"),
                "run.toml:2: unknown section [optimiser], did you mean [optimizer]?; sections: model,");
  expect_starts(message_of("\n[optimiser]\n"),
                "run.toml:2: unknown section [optimiser], did you mean [optimizer]?");
  expect_starts(message_of("dump_foldr = \"x\""),
                "run.toml:1: unknown key dump_foldr, did you mean dump_folder?");
  expect_starts(message_of("", {"--optimizer.lrr=1"}),
                "--optimizer.lrr: unknown key [optimizer] lrr, did you mean lr?");
  expect_starts(message_of("[training.inner]\nsteps = 1"), "run.toml:1: unknown key [training] inner");
}

TEST(TrainConfig, TorchtitansOtherKeysAreRefusedWithAReason) {
  EXPECT_EQ(message_of("[training]\nlocal_batch_size = 8"),
            "run.toml:2: [training] local_batch_size: titanium has no such key: a step is global_batch_size "
            "sequences, cut "
            "into micro-batches of max_tokens_per_microbatch tokens");
  expect_starts(message_of("[debug]\nseed = 1"),
                "run.toml:2: [debug] seed: titanium has no such key: use training.seed");
  expect_starts(message_of("[debug]\ndetect_anomaly = true"),
                "run.toml:2: [debug] detect_anomaly: titanium has no such key: not");
  expect_starts(message_of("[training]\ndeterministic = true"),
                "run.toml:2: [training] deterministic: titanium has no such key: always so in bfloat16; in "
                "float32 and float64 for a fixed training.threads");
  expect_starts(message_of("[compile]\nenable = true"),
                "run.toml:2: [compile] enable: titanium has no such key: titanium has no graph");
  expect_starts(message_of("[validation]\nfreq = 1"),
                "run.toml:2: [validation] freq: titanium has no such key: the section is called [validator]");

  // Every key of torchtitan 0.3.0's sections is one of ours or has a reason.
  const std::map<std::string, Strings> theirs = {
      {"training",
       {"local_batch_size", "global_batch_size", "seq_len", "max_norm", "steps", "enable_cpu_offload",
        "disable_cuda_graphs", "dtype", "mixed_precision_param", "mixed_precision_reduce", "gc_freq",
        "gc_debug"}},
      {"parallelism",
       {"data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "enable_fsdp_symm_mem", "tensor_parallel_degree", "enable_sequence_parallel", "spmd_backend",
        "pipeline_parallel_degree", "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers",
        "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage",
        "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size",
        "context_parallel_degree", "context_parallel_load_balancer", "context_parallel_ptrr_mask_key",
        "expert_parallel_degree"}},
      {"optimizer", {"param_groups", "implementation", "optimizer_factory_kwargs_by_name"}},
      {"lr_scheduler", {"warmup_steps", "total_steps", "decay_ratio", "decay_type", "min_lr_factor"}},
      {"checkpoint",
       {"enable", "folder", "interval", "initial_load_path", "initial_load_model_only", "initial_load_in_hf",
        "initial_load_in_hf_quantized", "last_save_model_only", "last_save_in_hf", "export_dtype",
        "keep_latest_k", "load_step", "exclude_from_loading", "enable_first_step_checkpoint",
        "create_seed_checkpoint", "load_only", "async_mode"}},
      {"metrics",
       {"log_freq", "enable_tensorboard", "disable_color_printing", "save_tb_folder", "save_for_all_ranks",
        "enable_wandb"}},
      {"validator", {"freq", "enable", "steps", "dataloader"}},
      {"comm",
       {"init_timeout_seconds", "train_timeout_seconds", "trace_buf_size", "save_traces_folder",
        "save_traces_file_prefix", "mode"}},
      {"activation_checkpoint",
       {"preserve_rng_state", "determinism_check", "debug", "force_recompute_mm_shapes_by_fqns",
        "memory_budget", "visualize_memory_budget_pareto"}},
      {"debug",
       {"seed", "deterministic", "deterministic_warn_only", "detect_anomaly", "print_config",
        "batch_invariant"}},
      {"profiler", {"enable_profiling"}},
      {"compile", {"enable", "components", "backend"}},
      {"", {"hf_assets_path", "dump_folder", "model_spec"}},
  };
  TrainConfig config;
  std::set<std::string> ours;
  for (const Section& section : describe(config)) {
    for (const Field& field : section.fields) ours.insert(key_name(section.name, field.name));
  }
  for (const auto& [section, keys] : theirs) {
    for (const std::string& key : keys) {
      if (ours.count(key_name(section, key)) != 0) continue;
      const std::string message =
          message_of(section.empty() ? key + " = 1" : "[" + section + "]\n" + key + " = 1");
      EXPECT_NE(message.find("titanium has no such key: "), std::string::npos) << message;
    }
  }
  for (const LackingKey& lacking : lacking_keys()) {
    EXPECT_EQ(ours.count(key_name(lacking.section, lacking.key)), 0u)
        << lacking.section << "." << lacking.key;
    EXPECT_FALSE(lacking.reason.empty());
  }
}

TEST(TrainConfig, OverridesWinAndAreStrict) {
  const TrainConfig c =
      parse("[training]\nsteps = 5\n[data]\npath = \"a\"",
            {"--training.steps=7", "data.path=x.jsonl,y z.jsonl", "--optimizer.lr=2e-4",
             "--data.shuffle=false", "--training.mixed_precision_param=float32", "--dump_folder=/d=1",
             "--training.steps=8", "--activation_checkpoint.selective_ac_option=3"});
  EXPECT_EQ(c.training.steps, 8);
  EXPECT_EQ(c.data.path, (Strings{"x.jsonl", "y z.jsonl"}));
  EXPECT_EQ(c.optimizer.lr, 2e-4);
  EXPECT_FALSE(c.data.shuffle);
  EXPECT_EQ(c.training.mixed_precision_param, Dtype::F32);
  EXPECT_EQ(c.dump_folder, "/d=1");
  EXPECT_EQ(c.activation_checkpoint.selective_ac_option, "3");
  EXPECT_EQ(parse("", {R"(--data.path=["a,b", "c"])"}).data.path, (Strings{"a,b", "c"}));
  EXPECT_TRUE(parse("", {"--data.path="}).data.path.empty());

  EXPECT_EQ(message_of("", {"--optimizer.lr=1e400"}),
            "--optimizer.lr: [optimizer] lr = \"1e400\": allowed: a finite number");
  EXPECT_EQ(message_of("", {"--optimizer.lr=1e-400"}),
            "--optimizer.lr: [optimizer] lr = \"1e-400\": allowed: a number > 0");
  EXPECT_EQ(message_of("", {"--training.steps=5x"}),
            "--training.steps: [training] steps = \"5x\": allowed: -1, or an integer from 1 to 1000000000");
  for (const char* bad :
       {"--training.steps=", "--training.steps= 5", "--training.steps=5.0", "--training.steps=0x5",
        "--training.steps=99999999999999999999", "--data.shuffle=1", "--data.shuffle=True",
        "--optimizer.lr=inf", "--optimizer.lr=nan", "--optimizer.lr=1e999", "--optimizer.lr=1,5",
        "--training.dtype=F32x", "--data.path=[1]", "--data.path=[\"a\"", "--data.path=a,,b",
        "--training.head_rows=", "--model.path=\xff"}) {
    expect_starts(message_of("", {bad}), std::string(bad).substr(0, std::string(bad).find('=')) + ": ");
  }
  EXPECT_EQ(message_of("", {"--training.steps"}), "--training.steps: allowed: --section.key=value");
  EXPECT_EQ(message_of("", {"=5"}), "=5: allowed: --section.key=value");
}

TEST(TrainConfig, AnAliasIsTheSameKey) {
  EXPECT_EQ(parse("hf_assets_path = \"m\"").model.path, "m");
  EXPECT_EQ(parse("", {"--hf_assets_path=m"}).model.path, "m");
  EXPECT_EQ(message_of("", {"--model.path=A", "--hf_assets_path=B"}),
            "--model.path and --hf_assets_path are one key: give it once");
  EXPECT_EQ(parse("", {"--model.path=A", "model.path=B"}).model.path, "B");
  expect_starts(message_of("hf_assets_path = \"m\"\n[model]\npath = \"n\""),
                "run.toml:3: hf_assets_path and model.path are one key");
}

TEST(TrainConfig, KeysAreCheckedAgainstEachOther) {
  expect_starts(message_of("", {"--training.seq_len=5000"}),
                "training.seq_len = 5000, training.max_tokens_per_microbatch = 4096");
  expect_starts(message_of("", {"--training.global_batch_size=-1"}), "training.global_batch_size = -1 and");
  expect_starts(message_of("", {"--training.global_batch_tokens=9999"}),
                "training.global_batch_size = 8 and");
  expect_starts(message_of("", {"--training.global_batch_size=-1", "--training.global_batch_tokens=100"}),
                "training.seq_len = 2048, training.global_batch_tokens");
  expect_starts(message_of("", {"--training.steps=5", "--lr_scheduler.warmup_steps=6"}),
                "lr_scheduler.warmup_steps = 6, training.steps = 5");
  expect_starts(message_of("", {"--lr_scheduler.total_steps=5", "--lr_scheduler.warmup_steps=6"}),
                "lr_scheduler.warmup_steps = 6, lr_scheduler.total_steps = 5");
  expect_starts(message_of("", {"--lr_scheduler.total_steps=5", "--training.steps=6"}),
                "lr_scheduler.total_steps = 5, training.steps = 6");
  // The same where the data say how many steps there are.
  const auto with_steps = [](const Strings& overrides, int64_t steps) -> std::string {
    try {
      check_schedule(parse("", overrides), steps);
    } catch (const BadConfig& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(
      with_steps({"--data.epochs=2", "--lr_scheduler.total_steps=3"}, 13),
      "lr_scheduler.total_steps = 3, data.epochs = 2 gives 13 steps: the schedule must not end before the "
      "run");
  EXPECT_EQ(with_steps({"--lr_scheduler.warmup_steps=14"}, 13),
            "lr_scheduler.warmup_steps = 14, data.epochs = 1 gives 13 steps: the warm-up must not be longer");
  EXPECT_EQ(with_steps({"--lr_scheduler.warmup_steps=13", "--lr_scheduler.total_steps=13"}, 13), "no error");
  expect_starts(message_of("", {"--checkpoint.resume=require", "--checkpoint.enable=false"}),
                "checkpoint.resume = require, checkpoint.enable = false");
  expect_starts(message_of("", {"--optimizer.state_dtype=bfloat16", "--training.dtype=float64"}),
                "optimizer.state_dtype = bfloat16, training.dtype = float64");
  expect_starts(message_of("", {"--training.mixed_precision_reduce=float64"}),
                "training.mixed_precision_reduce = float64, training.mixed_precision_param = bfloat16");
  expect_starts(message_of("", {"--training.loss_agg_mode=seq-mean-token-sum-norm"}),
                "training.loss_agg_mode");
  expect_starts(message_of("", {"--training.mixed_precision_param=float64"}),
                "training.mixed_precision_param = float64, training.mixed_precision_reduce = float32");
  expect_starts(message_of("", {"--data.validation_path=v", "--data.validation_split=0.1"}),
                "data.validation_path and data.validation_split");
  expect_starts(message_of("", {"--checkpoint.load_step=3", "--checkpoint.resume=never"}),
                "checkpoint.load_step = 3");
  expect_starts(message_of("", {"--checkpoint.initial_load_model_only=false"}),
                "checkpoint.initial_load_model_only = false needs");
  expect_starts(
      message_of("", {"--checkpoint.initial_load_model_only=false", "--checkpoint.initial_load_path=p"}),
      "checkpoint.initial_load_model_only = false, checkpoint.initial_load_in_hf");
  EXPECT_EQ(message_of("", {"--training.steps=5", "--lr_scheduler.warmup_steps=5", "--training.seq_len=4096",
                            "--training.mixed_precision_param=float64",
                            "--training.mixed_precision_reduce=float64"}),
            "no error");

  TrainConfig c;
  EXPECT_THROW(check_complete(c), BadConfig);
  EXPECT_THROW(check_model(c), BadConfig);
  c.model.path = "m";
  check_model(c);
  EXPECT_THROW(check_complete(c), BadConfig);
  c.data.path = {"d"};
  check_complete(c);
}

// A value other than the default for every key goes through print and parse.
TEST(TrainConfig, PrintedConfigReadsBackTheSame) {
  EXPECT_EQ(print_train_config(parse(print_train_config(TrainConfig()))), print_train_config(TrainConfig()));

  int fields = 0, changed = 0;
  TrainConfig shape;
  for (size_t s = 0; s < describe(shape).size(); ++s) {
    for (size_t f = 0; f < describe(shape)[s].fields.size(); ++f) {
      ++fields;
      const Field& known = describe(shape)[s].fields[f];
      std::vector<FieldValue> candidates = {true,
                                            false,
                                            int64_t{1},
                                            int64_t{7},
                                            int64_t{3000},
                                            0.1 + 0.2,
                                            1e-300,
                                            5.0,
                                            std::string("a\"b\\c\n\t\x01\x7f é"),
                                            std::string("3"),
                                            Strings{"x", "y\"\\"},
                                            Dtype::BF16,
                                            Dtype::F64};
      for (const char* name : {"none", "full", "all", "skip", "truncate", "keep", "text", "SGD", "cosine",
                               "disabled", "never", "always", "seq-mean-token-sum"}) {
        candidates.emplace_back(std::string(name));
      }
      for (const FieldValue& candidate : candidates) {
        TrainConfig c;
        const Field field = describe(c)[s].fields[f];
        if (candidate.index() != field.value().index() || candidate == field.value() ||
            !field.check.ok(candidate))
          continue;
        field.assign(candidate);
        try {
          check_together(c);
        } catch (const BadConfig&) {
          continue;
        }
        TrainConfig again = parse(print_train_config(c));
        EXPECT_TRUE(describe(again)[s].fields[f].value() == candidate) << known.name << "\n"
                                                                       << print_train_config(c);
        EXPECT_EQ(print_train_config(again), print_train_config(c));
        ++changed;
        break;
      }
    }
  }
  EXPECT_GT(fields, 70);
  EXPECT_GE(changed,
            fields - 12);  // degrees that may only be 1, and keys that need another one to change with them
}

TEST(TrainConfig, DefaultsAreAllowed) {
  TrainConfig c;
  std::set<std::string> names;
  for (const Section& section : describe(c)) {
    for (const Field& field : section.fields) {
      EXPECT_TRUE(field.check.ok(field.value())) << field.name;
      EXPECT_TRUE(names.insert(key_name(section.name, field.name)).second) << field.name;
      EXPECT_EQ(field.doc.find('|'), std::string::npos) << field.name;
      EXPECT_TRUE(!field.doc.empty()) << field.name;
    }
  }
  check_together(c);
}

TEST(TrainConfig, HelpAndPageNameEveryKey) {
  TrainConfig c;
  const std::string help = config_help();
  for (const Section& section : describe(c)) {
    for (const Field& field : section.fields) {
      EXPECT_NE(help.find("  " + field.name + " = " + toml_text(field.value())), std::string::npos)
          << field.name;
    }
  }
  const std::string page = read_file(std::string(TITANIUM_SOURCE_DIR) + "/docs/config.md");
  const std::string made = std::string(TITANIUM_BINARY_DIR) + "/config.md";
  std::ofstream(made) << config_markdown();
  EXPECT_TRUE(page == config_markdown()) << "docs/config.md is out of date: replace it by " << made;
}

TEST(TrainConfig, FilesAreBounded) {
  std::string deep = "[a";
  for (int i = 0; i < 100000; ++i) deep += ".a";
  EXPECT_EQ(message_of(deep + "]\n"), "run.toml:1: more than 64 dots outside strings");
  EXPECT_EQ(message_of("\n" + std::string(100, '{')), "run.toml:2: more than 64 inline tables");
  expect_starts(message_of(std::string(2 << 20, '\n')), "run.toml: 2097152 bytes");
  expect_starts(message_of("x = " + std::string(100000, '[')), "run.toml:1: not TOML: ");
  // A string may end in up to five quotes; what follows is outside it.
  EXPECT_EQ(message_of("x = \"\"\"a\"\"\"\"\"\n" + deep + "]"),
            "run.toml:2: more than 64 dots outside strings");
  EXPECT_EQ(message_of("x = '''a''''\n" + deep + "]"), "run.toml:2: more than 64 dots outside strings");
  // Dots in strings and comments do not count.
  std::string list;
  for (int i = 0; i < 100; ++i) list += R"("a.jsonl", '../b.jsonl', )";
  EXPECT_EQ(parse("[data] # " + std::string(100, '.') + "\npath = [" + list + "]").data.path.size(), 200u);
  EXPECT_EQ(
      parse("[data]\nchat_template = \"\"\"\n" + std::string(200, '.') + "\"\"\"").data.chat_template.size(),
      200u);
}

TEST(TrainConfig, CharactersOutsideAscii) {
  const auto path_of = [](const std::string& text) {
    return parse("[model] # é\npath = " + text).model.path;
  };
  EXPECT_EQ(path_of("\"données/é\""), "données/é");
  EXPECT_EQ(path_of("'données\\é'"), "données\\é");
  EXPECT_EQ(path_of("\"\"\"é\\\n  é\"\"\""), "éé");
  EXPECT_EQ(path_of("\"\\u00e9~0:e9~~0😀~\""), "é~0:e9~~0😀~");  // text that looks like our own mark
  EXPECT_EQ(parse("\xef\xbb\xbf[data]\npath = [\"é\", '''ü''']").data.path, (Strings{"é", "ü"}));
  EXPECT_EQ(message_of("[optimizer]\nname = \"é\""),
            "run.toml:2: [optimizer] name = \"é\": allowed: AdamW, SGD");
  expect_starts(message_of("[optimizer]\n\"clé\" = 1"), "run.toml:2: unknown key [optimizer] clé; keys of");
  expect_starts(message_of("[model]\nclé = 1"), "run.toml:2: not TOML: ");
  expect_starts(message_of("[model]\npath = \"x\"\xc2\xa0"), "run.toml:2: not TOML: ");
  expect_starts(message_of("d=2021-01-01T'0:aҝѠ[\n"), "run.toml:1: not TOML: ");
  expect_starts(message_of("[model]\npath = \"\\u007e0:c3é\""), "run.toml: write ~ itself");
  EXPECT_EQ(parse("[model]\npath = \"\\u007e0:c3\"").model.path, "~0:c3");
}

TEST(TrainConfig, LoadsFromAFileOrNone) {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / "titanium_train_config_test.toml";
  std::ofstream(file) << "[training]\nsteps = 9\n";
  EXPECT_EQ(load_train_config(file, {"--training.seed=3"}).training.steps, 9);
  std::filesystem::remove(file);
  EXPECT_EQ(load_train_config(std::nullopt, {"--training.seed=3"}).training.seed, 3);
  EXPECT_THROW(load_train_config(file), BadConfig);
}

TEST(Nearest, Distance) {
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("weigth", "weight"), 1);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(nearest("stps", Strings{"steps", "seed"}), "steps");
  EXPECT_EQ(nearest("qqqq", Strings{"steps", "seed"}), "");
}

TEST(Utf8, Rfc3629) {
  EXPECT_TRUE(is_utf8("aé€😀"));
  for (const char* bad :
       {"\xff", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xc3", "\x80"}) {
    EXPECT_FALSE(is_utf8(bad)) << bad;
  }
}

}  // namespace
}  // namespace titanium
