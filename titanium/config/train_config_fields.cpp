#include "titanium/config/train_config_fields.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <initializer_list>

#include "titanium/base/error.h"

namespace titanium {
namespace {

FieldCheck any() {
  return {"", [](const FieldValue&) { return true; }};
}

FieldCheck nonempty() {
  return {"a string that is not empty",
          [](const FieldValue& v) { return !std::get<std::string>(v).empty(); }};
}

// Of a path inside dump_folder; where `or_empty`, it may be left out.
FieldCheck inside(bool or_empty = false) {
  return {std::string("a relative path without ..") + (or_empty ? ", or nothing" : ""),
          [or_empty](const FieldValue& v) {
            const std::filesystem::path path = std::get<std::string>(v);
            if (path.empty()) return or_empty;
            const std::filesystem::path plain = path.lexically_normal();
            return plain.is_relative() && plain != "." && plain != "./" && *plain.begin() != "..";
          }};
}

FieldCheck one_of(std::vector<std::string> names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return {text, [names = std::move(names)](const FieldValue& v) {
            return std::find(names.begin(), names.end(), std::get<std::string>(v)) != names.end();
          }};
}

FieldCheck dtype_of(std::vector<Dtype> dtypes) {
  std::string text;
  for (Dtype dtype : dtypes) text += (text.empty() ? "" : ", ") + std::string(torch_name(dtype));
  return {text, [dtypes = std::move(dtypes)](const FieldValue& v) {
            return std::find(dtypes.begin(), dtypes.end(), std::get<Dtype>(v)) != dtypes.end();
          }};
}

// Keeps counts of steps, samples and tokens, and products of two of them, inside 64 bits.
constexpr int64_t kMostCount = 1'000'000'000;
constexpr int64_t kMostRanks = 1'000'000;  // so that a product of degrees stays inside 64 bits
constexpr int64_t kMostThreads = 1024;

FieldCheck integer(int64_t least, int64_t most = kMostCount) {
  return {fmt::format("an integer from {} to {}", least, most),
          [=](const FieldValue& v) { return std::get<int64_t>(v) >= least && std::get<int64_t>(v) <= most; }};
}

FieldCheck or_integer(int64_t special, int64_t least) {
  FieldCheck range = integer(least);
  return {fmt::format("{}, or {}", special, range.allowed),
          [special, ok = range.ok](const FieldValue& v) { return std::get<int64_t>(v) == special || ok(v); }};
}

FieldCheck not_negative() {
  return {"an integer >= 0", [](const FieldValue& v) { return std::get<int64_t>(v) >= 0; }};
}

FieldCheck one_in_this_version() {
  return {"1 (in this version)", [](const FieldValue& v) { return std::get<int64_t>(v) == 1; }};
}

FieldCheck above(double least) {
  return {fmt::format("a number > {}", least),
          [least](const FieldValue& v) { return std::get<double>(v) > least; }};
}

FieldCheck not_below(double least) {
  return {fmt::format("a number >= {}", least),
          [least](const FieldValue& v) { return std::get<double>(v) >= least; }};
}

FieldCheck from_to(double least, double most) {
  return {fmt::format("a number from {} to {}", least, most), [least, most](const FieldValue& v) {
            return std::get<double>(v) >= least && std::get<double>(v) <= most;
          }};
}

FieldCheck from_below(double least, double bound) {
  return {fmt::format("a number >= {} and < {}", least, bound), [least, bound](const FieldValue& v) {
            return std::get<double>(v) >= least && std::get<double>(v) < bound;
          }};
}

FieldCheck unset_or_share() {
  return {"-1, or a number from 0 to 1", [](const FieldValue& v) {
            const double x = std::get<double>(v);
            return x == -1 || (x >= 0 && x <= 1);
          }};
}

FieldCheck op_or_every_nth() {
  return {fmt::format("op, or an integer from 1 to {}", kMostCount),
          [](const FieldValue& v) {
            const std::string& text = std::get<std::string>(v);
            int64_t n = 0;
            const char* end = text.data() + text.size();
            const auto result = std::from_chars(text.data(), end, n);
            return text == "op" ||
                   (result.ec == std::errc() && result.ptr == end && n >= 1 && n <= kMostCount);
          },
          true};
}

FieldCheck paths() {
  return {"a path, or a list of paths", [](const FieldValue& v) {
            const auto& list = std::get<std::vector<std::string>>(v);
            return std::none_of(list.begin(), list.end(),
                                [](const std::string& path) { return path.empty(); });
          }};
}

FieldCheck patterns() {
  return {"a name pattern, or a list of them", paths().ok};
}

std::vector<Dtype> compute_dtypes() {
  return {Dtype::F32, Dtype::BF16, Dtype::F64};
}

}  // namespace

std::string Field::allowed() const {
  if (!check.allowed.empty()) return check.allowed;
  struct TypeName {
    const char* operator()(const bool*) const { return "true, false"; }
    const char* operator()(const int64_t*) const { return "an integer"; }
    const char* operator()(const double*) const { return "a number"; }
    const char* operator()(const std::string*) const { return "a string"; }
    const char* operator()(const std::vector<std::string>*) const { return "a string, or a list of strings"; }
    const char* operator()(const Dtype*) const { return "a dtype"; }
  };
  return std::visit(TypeName{}, target);
}

FieldValue Field::value() const {
  return std::visit([](auto* pointer) { return FieldValue(*pointer); }, target);
}

void Field::assign(const FieldValue& value) const {
  std::visit([&](auto* pointer) { *pointer = std::get<std::remove_pointer_t<decltype(pointer)>>(value); },
             target);
}

std::string key_name(std::string_view section, std::string_view key) {
  return section.empty() ? std::string(key) : fmt::format("{}.{}", section, key);
}

std::vector<Section> describe(TrainConfig& c) {
  return {
      {"",
       "Keys that stand before the first section.",
       {{"dump_folder", &c.dump_folder, "folder of everything a run writes", nonempty(), {}},
        {"hf_assets_path", &c.model.path, "torchtitan's name of model.path", any(), "model.path"}}},

      {"model",
       "What is trained. Its shape is read from the folder's config.json.",
       {{"path", &c.model.path, "Hugging Face folder: config.json, safetensors, tokenizer.json", any(), {}},
        {"freeze",
         &c.model.freeze,
         "weights that do not train, by name; * stands for any characters, ? for one",
         patterns(),
         {}}}},

      {"training",
       "The step.",
       {{"seed", &c.training.seed, "every random number of the run is a function of it", not_negative(), {}},
        {"steps",
         &c.training.steps,
         "number of updates; -1: as many as data.epochs gives",
         or_integer(-1, 1),
         {}},
        {"global_batch_size",
         &c.training.global_batch_size,
         "sequences of a step, over all ranks; -1: global_batch_tokens says",
         or_integer(-1, 1),
         {}},
        {"global_batch_tokens",
         &c.training.global_batch_tokens,
         "in place of global_batch_size: a step takes as many consecutive sequences as fit this many tokens",
         or_integer(-1, 1),
         {}},
        {"max_tokens_per_microbatch",
         &c.training.max_tokens_per_microbatch,
         "budget to which sequences are packed; sets the memory of a step, never its result",
         integer(1),
         {}},
        {"seq_len",
         &c.training.seq_len,
         "longest sequence in tokens; data.on_long_record says what becomes of others",
         integer(2),
         {}},
        {"max_norm",
         &c.training.max_norm,
         "gradients are clipped to this global norm; 0 does not clip",
         not_below(0),
         {}},
        {"dtype", &c.training.dtype, "of the stored parameters", dtype_of(compute_dtypes()), {}},
        {"mixed_precision_param",
         &c.training.mixed_precision_param,
         "of the computation",
         dtype_of(compute_dtypes()),
         {}},
        {"mixed_precision_reduce",
         &c.training.mixed_precision_reduce,
         "of gradients and of their sums over micro-batches and ranks",
         dtype_of({Dtype::F32, Dtype::F64}),
         {}},
        {"loss_agg_mode",
         &c.training.loss_agg_mode,
         "how token losses become one number (verl's names)",
         one_of({"token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"}),
         {}},
        {"loss_scale_factor",
         &c.training.loss_scale_factor,
         "divisor of seq-mean-token-sum-norm, which needs it",
         not_below(0),
         {}},
        {"head_rows",
         &c.training.head_rows,
         "tokens that pass through the head: those with a loss, or all",
         one_of({"weighted", "all"}),
         {}},
        {"threads",
         &c.training.threads,
         "compute threads of a rank; 0: one a core",
         integer(0, kMostThreads),
         {}},
        {"enable_cpu_offload",
         &c.training.enable_cpu_offload,
         "parameters, gradients and optimizer state stay in the host's memory, where on the cpu device they "
         "are anyway; "
         "there it gives back the cast weights after each step, which makes them anew; results are the same",
         any(),
         {}}}},

      {"data",
       "Records to train on.",
       {{"path", &c.data.path, "JSONL files, in this order", paths(), {}},
        {"format",
         &c.data.format,
         "form of the records; auto: by the fields of each",
         one_of({"auto", "messages", "prompt_response", "text", "input_ids"}),
         {}},
        {"epochs", &c.data.epochs, "passes over the data where training.steps is -1", integer(1), {}},
        {"shuffle", &c.data.shuffle, "a new order every epoch, a function of the seed", any(), {}},
        {"last_batch",
         &c.data.last_batch,
         "records at the end of the last epoch that do not fill a step",
         one_of({"drop", "keep", "fail"}),
         {}},
        {"validation_path", &c.data.validation_path, "JSONL files held out for validation", paths(), {}},
        {"validation_split",
         &c.data.validation_split,
         "or this share of the records of data.path",
         from_below(0, 1),
         {}},
        {"on_bad_record",
         &c.data.on_bad_record,
         "a record that cannot be used",
         one_of({"fail", "skip"}),
         {}},
        {"on_long_record",
         &c.data.on_long_record,
         "a record longer than training.seq_len",
         one_of({"fail", "truncate", "drop"}),
         {}},
        {"mask_trailing_newline",
         &c.data.mask_trailing_newline,
         "train also on the white space after an assistant turn's end, as verl does",
         any(),
         {}},
        {"mask_last_turn_only",
         &c.data.mask_last_turn_only,
         "train on the last assistant turn only",
         any(),
         {}},
        {"chat_template",
         &c.data.chat_template,
         "file with a Jinja template to use in place of the model's",
         any(),
         {}},
        {"add_eos",
         &c.data.add_eos,
         "end text and response records with the end-of-sequence token",
         any(),
         {}}}},

      {"optimizer",
       "The update.",
       {{"name", &c.optimizer.name, "rule of the update", one_of({"AdamW", "SGD"}), {}},
        {"lr", &c.optimizer.lr, "learning rate at the top of the schedule", above(0), {}},
        {"beta1", &c.optimizer.beta1, "AdamW: decay of the mean of gradients", from_below(0, 1), {}},
        {"beta2", &c.optimizer.beta2, "AdamW: decay of the mean of squared gradients", from_below(0, 1), {}},
        {"eps", &c.optimizer.eps, "AdamW: added to the divisor", above(0), {}},
        {"weight_decay",
         &c.optimizer.weight_decay,
         "decoupled, at the scheduled learning rate",
         not_below(0),
         {}},
        {"momentum", &c.optimizer.momentum, "SGD", from_below(0, 1), {}},
        {"decay_norms_and_biases",
         &c.optimizer.decay_norms_and_biases,
         "weight decay touches every tensor, as in torch; false spares norms and biases",
         any(),
         {}},
        {"state_dtype",
         &c.optimizer.state_dtype,
         "of the optimizer's own tensors; float64 parameters have float64 state",
         dtype_of({Dtype::F32, Dtype::BF16, Dtype::F64}),
         {}}}},

      {"lr_scheduler",
       "Learning rate over the steps: warm-up, a stable part, decay.",
       {{"warmup_steps",
         &c.lr_scheduler.warmup_steps,
         "steps of linear warm-up; the first step has 1/warmup_steps",
         integer(0),
         {}},
        {"total_steps",
         &c.lr_scheduler.total_steps,
         "length of the schedule; -1: the steps of the run",
         or_integer(-1, 1),
         {}},
        {"decay_type",
         &c.lr_scheduler.decay_type,
         "constant never decays; wsd is stable for stable_ratio of the steps after warm-up, then a cosine",
         one_of({"linear", "sqrt", "cosine", "constant", "wsd"}),
         {}},
        {"decay_ratio",
         &c.lr_scheduler.decay_ratio,
         "linear, sqrt, cosine: share of the steps that decay, at the end; -1: all after warm-up",
         unset_or_share(),
         {}},
        {"stable_ratio",
         &c.lr_scheduler.stable_ratio,
         "wsd: share of the steps after warm-up that are stable",
         from_to(0, 1),
         {}},
        {"min_lr_factor",
         &c.lr_scheduler.min_lr_factor,
         "lowest learning rate after warm-up, as a share of lr",
         from_to(0, 1),
         {}}}},

      {"checkpoint",
       "Saving, resuming, exporting.",
       {{"enable",
         &c.checkpoint.enable,
         "save while training, at the end, and on SIGINT or SIGTERM",
         any(),
         {}},
        {"folder", &c.checkpoint.folder, "inside dump_folder", inside(), {}},
        {"interval", &c.checkpoint.interval, "steps between saves", integer(1), {}},
        {"keep_latest_k",
         &c.checkpoint.keep_latest_k,
         "older checkpoints are removed; 0 keeps all",
         integer(0),
         {}},
        {"async_mode",
         &c.checkpoint.async_mode,
         "async: training goes on while files are written",
         one_of({"disabled", "async"}),
         {}},
        {"resume",
         &c.checkpoint.resume,
         "auto: from the latest complete checkpoint where there is one; never: refuse a folder that has one; "
         "require: "
         "refuse a folder that has none",
         one_of({"auto", "never", "require"}),
         {}},
        {"load_step",
         &c.checkpoint.load_step,
         "resume from this step; -1: the latest",
         or_integer(-1, 0),
         {}},
        {"initial_load_path",
         &c.checkpoint.initial_load_path,
         "where a new run takes its weights from; empty: model.path",
         any(),
         {}},
        {"initial_load_model_only",
         &c.checkpoint.initial_load_model_only,
         "take weights alone; false takes the optimizer's state and the step too",
         any(),
         {}},
        {"initial_load_in_hf",
         &c.checkpoint.initial_load_in_hf,
         "the weights are a Hugging Face folder; false: a titanium checkpoint, or without initial_load_path "
         "a random start",
         any(),
         {}},
        {"last_save_in_hf",
         &c.checkpoint.last_save_in_hf,
         "export a Hugging Face folder at the end",
         any(),
         {}},
        {"export_folder", &c.checkpoint.export_folder, "of that export, inside dump_folder", inside(), {}},
        {"export_dtype",
         &c.checkpoint.export_dtype,
         "of that export",
         dtype_of({Dtype::F32, Dtype::BF16, Dtype::F16, Dtype::F64}),
         {}}}},

      {"activation_checkpoint",
       "Less memory for activations, more computation.",
       {{"mode",
         &c.activation_checkpoint.mode,
         "recompute nothing, some, or whole blocks in backward",
         one_of({"none", "selective", "full"}),
         {}},
        {"selective_ac_option",
         &c.activation_checkpoint.selective_ac_option,
         "selective: op keeps the results of matrix products and attention; a number n recomputes every n-th "
         "block",
         op_or_every_nth(),
         {}}}},

      {"parallelism",
       "The device mesh.",
       {{"data_parallel_replicate_degree",
         &c.parallelism.data_parallel_replicate_degree,
         "copies of the model",
         integer(1, kMostRanks),
         {}},
        {"data_parallel_shard_degree",
         &c.parallelism.data_parallel_shard_degree,
         "ranks that share one copy; -1: the ranks that are left",
         or_integer(-1, 1),
         {}},
        {"tensor_parallel_degree",
         &c.parallelism.tensor_parallel_degree,
         "ranks that share each matrix, and the tokens between them",
         integer(1, kMostRanks),
         {}},
        {"pipeline_parallel_degree",
         &c.parallelism.pipeline_parallel_degree,
         "ranks that have stages of consecutive blocks each",
         integer(1, kMostRanks),
         {}},
        {"context_parallel_degree",
         &c.parallelism.context_parallel_degree,
         "ranks that share the tokens of a micro-batch",
         one_in_this_version(),
         {}},
        {"expert_parallel_degree",
         &c.parallelism.expert_parallel_degree,
         "ranks that share the experts",
         one_in_this_version(),
         {}},
        {"fsdp_reshard_after_forward",
         &c.parallelism.fsdp_reshard_after_forward,
         "let go of gathered weights between forward and backward; default: unless there is a pipeline; no "
         "effect where weights are not sharded",
         one_of({"default", "always", "never"}),
         {}},
        {"fsdp_reduce",
         &c.parallelism.fsdp_reduce,
         "when gradients are summed over ranks: after the last micro-batch, so that a rank keeps its sum of "
         "whole gradients between them, or after each, for less memory and more traffic",
         one_of({"last", "each_micro_batch"}),
         {}},
        {"pipeline_parallel_schedule",
         &c.parallelism.pipeline_parallel_schedule,
         "in which order stages run",
         one_of({"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
                 "DualPipeV"}),
         {}},
        {"pipeline_parallel_schedule_csv",
         &c.parallelism.pipeline_parallel_schedule_csv,
         "a file with an order of stages, as PyTorch writes it, instead of a schedule by name",
         any(),
         {}},
        {"pipeline_parallel_layers_per_stage",
         &c.parallelism.pipeline_parallel_layers_per_stage,
         "layers of a stage, which say how many stages there are; 0: one a rank, or two where the schedule "
         "wants several",
         integer(0, kMostRanks),
         {}},
        {"pipeline_parallel_first_stage_less_layers",
         &c.parallelism.pipeline_parallel_first_stage_less_layers,
         "layers that the embedding counts for; -1: stages are balanced by what blocks compute",
         or_integer(-1, 0),
         {}},
        {"pipeline_parallel_last_stage_less_layers",
         &c.parallelism.pipeline_parallel_last_stage_less_layers,
         "layers that the head counts for; -1: stages are balanced by what blocks compute",
         or_integer(-1, 0),
         {}}}},

      {"metrics",
       "What a run reports.",
       {{"log_freq",
         &c.metrics.log_freq,
         "steps between progress lines; the files below hold every step",
         integer(1),
         {}},
        {"jsonl_file",
         &c.metrics.jsonl_file,
         "inside dump_folder, one JSON object a step and one a validation; empty: none",
         inside(true),
         {}},
        {"enable_tensorboard", &c.metrics.enable_tensorboard, "write TensorBoard files", any(), {}},
        {"save_tb_folder", &c.metrics.save_tb_folder, "their folder, inside dump_folder", inside(), {}}}},

      {"validator",
       "Loss on held-out records, where data.validation_path or data.validation_split gives any.",
       {{"enable", &c.validator.enable, "validate where there are such records", any(), {}},
        {"freq", &c.validator.freq, "steps between validations", integer(1), {}},
        {"steps",
         &c.validator.steps,
         "batches of a validation, each as large as a step's; -1: all records",
         or_integer(-1, 1),
         {}}}},

      {"comm",
       "How long ranks wait for each other; no effect in one process.",
       {{"transport",
         &c.comm.transport,
         "what joins ranks; local: memory that those of one host share; auto: local on one host, else gloo",
         one_of({"auto", "local", "gloo", "nccl"}),
         {}},
        {"init_timeout_seconds", &c.comm.init_timeout_seconds, "until all ranks have met", integer(1), {}},
        {"train_timeout_seconds", &c.comm.train_timeout_seconds, "in any later operation", integer(1), {}}}},
  };
}

}  // namespace titanium
