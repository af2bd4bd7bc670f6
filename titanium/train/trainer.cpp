#include "titanium/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cmath>
#include <filesystem>

#include "titanium/base/error.h"
#include "titanium/loss/sft.h"
#include "titanium/report/format.h"
#include "titanium/train/estimate.h"
#include "titanium/train/micro_batches.h"
#include "titanium/weights/hf_export.h"
#include "titanium/weights/hf_load.h"

namespace titanium {
namespace {

LrFactor lr_factor(const LRSchedulerConfig& c, int64_t steps) {
  LrScheduleOptions options;
  options.total_steps = c.total_steps > 0 ? c.total_steps : steps;
  options.warmup_steps = c.warmup_steps;
  options.decay = parse_lr_decay(c.decay_type);
  options.decay_ratio = c.decay_ratio;
  options.stable_ratio = c.stable_ratio;
  options.min_lr_factor = c.min_lr_factor;
  return torchtitan_schedule(options);
}

std::filesystem::path in_dump_folder(const TrainConfig& config, const std::string& path) {
  return std::filesystem::path(config.dump_folder) / path;
}

// What a run cannot change between a save and a resume without becoming another run.
Json identity(const TrainConfig& config, const TrainingData& data) {
  return {{"seed", config.training.seed},
          {"shuffle", config.data.shuffle},
          {"validation_split", config.data.validation_split},
          {"data_fingerprint", fmt::format("{:016x}", data.train.fingerprint())}};
}

int use_threads(const TrainingConfig& config) {
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  return at::get_num_threads();
}

}  // namespace

Trainer::Trainer(Config config, Log& log)
    : config_(std::move(config)),
      log_(log),
      session_((use_threads(config_.training),
                open_session(config_.model.path, config_, log, /*load_weights=*/false))),
      data_(load_training_data(config_, session_, log)),
      optimizer_(make_optimizer(*session_.store, optimizer_options(config_.optimizer))),
      schedule_(lr_factor(config_.lr_scheduler, data_.steps), config_.optimizer.lr) {
  CheckpointOptions options;
  options.folder = in_dump_folder(config_, config_.checkpoint.folder);
  options.keep_latest_k = config_.checkpoint.keep_latest_k;
  options.async = config_.checkpoint.async_mode == "async";
  checkpointer_ = std::make_unique<Checkpointer>(*session_.store, optimizer_.get(), options);
  start();
  summary();
}

Trainer::~Trainer() = default;

// The checkpoint of this run to go on from; empty for a new run.
std::filesystem::path Trainer::resume_from() const {
  const auto& c = config_.checkpoint;
  const auto folder = in_dump_folder(config_, c.folder);
  const LatestCheckpoint latest = c.enable ? find_latest(folder) : LatestCheckpoint();
  for (const std::string& warning : latest.warnings) log_.warn("{}", warning);
  if (c.resume == "never" && latest.found) {
    throw BadConfig(
        "checkpoint.resume = \"never\", but {} holds a checkpoint of step {}: give another dump_folder, or "
        "remove it",
        folder.string(), latest.found->step);
  }
  if (c.resume == "require" && !latest.found) {
    throw BadConfig("checkpoint.resume = \"require\", but {} holds no complete checkpoint", folder.string());
  }
  if (c.load_step >= 0) {
    const auto path = folder / fmt::format("step-{}", c.load_step);
    if (!std::filesystem::exists(path)) {
      throw BadConfig("checkpoint.load_step = {}: {} does not exist", c.load_step, path.string());
    }
    if (latest.found && latest.found->step > c.load_step) {
      throw BadConfig(
          "checkpoint.load_step = {}, but {} also holds step {}, which the next resume would take instead of "
          "what "
          "this run saves: move newer checkpoints away, or give another dump_folder and "
          "checkpoint.initial_load_path = {}, checkpoint.initial_load_model_only = false",
          c.load_step, folder.string(), latest.found->step, path.string());
    }
    return path;
  }
  return latest.found ? latest.found->path : std::filesystem::path();
}

void Trainer::start() {
  const auto& c = config_.checkpoint;
  const auto load = [&](const std::filesystem::path& folder) {
    const HfLoadReport report = load_hf(folder, *session_.store);
    log_.info("{}: {} tensors, {}", folder.string(), report.tensors, human_bytes(report.bytes));
    for (const std::string& ignored : report.ignored)
      log_.info("{}: {} is not used", folder.string(), ignored);
  };
  int64_t position = 0;
  const auto go_on = [&](const std::filesystem::path& checkpoint) {
    const LoadedCheckpoint loaded = checkpointer_->load(checkpoint);
    restore(loaded);
    position = loaded.train.at("position").get<int64_t>();
    log_.info("resumed {} after {} updates", checkpoint.string(), step_);
  };
  if (const auto checkpoint = resume_from(); !checkpoint.empty()) {
    go_on(checkpoint);
  } else if (c.initial_load_in_hf) {
    load(c.initial_load_path.empty() ? session_.folder : std::filesystem::path(c.initial_load_path));
  } else if (c.initial_load_path.empty()) {
    session_.store->init(static_cast<uint64_t>(config_.training.seed));
    log_.info("weights are random, of training.seed = {}", config_.training.seed);
  } else if (c.initial_load_model_only) {
    checkpointer_->load_masters(c.initial_load_path);
    log_.info("weights of {}", c.initial_load_path);
  } else {
    go_on(c.initial_load_path);
  }
  loader_ = std::make_unique<Loader>(data_.train, data_.sampler, position);
}

void Trainer::restore(const LoadedCheckpoint& loaded) {
  const Json now = identity(config_, data_);
  for (const auto& [key, value] : now.items()) {
    const Json was = loaded.train.at("identity").value(key, Json());
    if (was != value) {
      throw BadConfig(
          "the checkpoint of step {} was made with {} = {}, this run has {}: it would not go on where it "
          "stopped. "
          "Give the old value, or start anew in another dump_folder",
          loaded.step, key, was.dump(), value.dump());
    }
  }
  step_ = saved_step_ = loaded.step;
  schedule_.set_position(step_);
}

Json Trainer::train_state() const {
  return {{"position", loader_->position()}, {"identity", identity(config_, data_)}};
}

void Trainer::summary() {
  const auto& spec = session_.spec;
  log_.info("model: {} {} ({}), {} parameters, {} layers", spec.name.name, spec.name.flavor,
            spec.name.hf_model_type, human_number(static_cast<double>(session_.store->parameters())),
            spec.config.num_hidden_layers);
  log_.info(
      "plan: {} of {} samples, micro-batches of up to {} tokens; {} masters, {} compute, recompute {}; {} "
      "threads",
      config_.training.global_batch_tokens > 0 ? "steps" : fmt::format("{} steps", data_.steps - step_),
      config_.training.global_batch_tokens > 0
          ? fmt::format("up to {} tokens", config_.training.global_batch_tokens)
          : std::to_string(config_.training.global_batch_size),
      config_.training.max_tokens_per_microbatch, name(config_.training.dtype),
      name(config_.training.mixed_precision_param), config_.activation_checkpoint.mode,
      at::get_num_threads());
  log_.info("memory: {}",
            estimate_memory(*session_.step, *optimizer_, config_.training.max_tokens_per_microbatch).text());
}

StepReport Trainer::train_step(Step step) {
  const auto begin = std::chrono::steady_clock::now();
  StepReport report;
  report.step = step_ + 1;
  for (const Sample& sample : step.samples) {
    report.tokens += sample.size();
    report.flops += 3 * session_.model->forward_flops(sample.size());
  }
  Counts counts;
  const auto batches = micro_batches(std::move(step.samples), config_.training, &counts);
  report.trained = counts.tokens;
  report.micro_batches = static_cast<int64_t>(batches.size());
  if (counts.tokens == 0) log_.warn("step {}: no token of the global batch has loss", report.step);
  report.loss = session_.step->forward_backward(batches, SftLoss()).loss.item<double>();
  const GradNorm norm = grad_norm(*session_.store);
  report.grad_norm = norm.value;
  report.lr = schedule_.lr();
  report.skipped = !norm.finite();
  if (report.skipped) {
    log_.warn("step {}: {}; the update is skipped", report.step, norm.describe());
    session_.store->zero_grad();
  } else {
    optimizer_->step({.lr = report.lr,
                      .clip = clip_coefficient(norm.value, config_.training.max_norm),
                      .zero_grad = true});
  }
  schedule_.step();
  ++step_;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return report;
}

std::optional<double> Trainer::validate() {
  const auto& records = data_.validation_records;
  if (!config_.validator.enable || records.empty()) return std::nullopt;
  const int64_t batch = std::max<int64_t>(config_.training.global_batch_size, 1);
  const int64_t limit =
      config_.validator.steps > 0 ? config_.validator.steps * batch : static_cast<int64_t>(records.size());
  std::vector<Sample> samples;
  int64_t tokens = 0;
  for (int64_t i = 0; i < std::min<int64_t>(limit, static_cast<int64_t>(records.size())); ++i) {
    samples.push_back(data_.validation_data().sample(records[i]));
    samples.back().index = i;
    tokens += trained_tokens(samples.back());
  }
  if (tokens == 0) return std::nullopt;
  TrainingConfig mean = config_.training;
  mean.loss_agg_mode = "token-mean";
  double sum = 0;
  // One micro-batch at a time, so that memory does not grow with the validation set.
  for (PackedBatch& one : micro_batches(std::move(samples), mean)) {
    sum += session_.step->forward({std::move(one)}, SftLoss()).loss.item<double>();
  }
  return sum;
}

void Trainer::save() {
  if (!config_.checkpoint.enable || saved_step_ == step_) return;
  checkpointer_->save(step_, train_state());
  saved_step_ = step_;
}

void Trainer::export_model() {
  HfExportOptions options;
  options.dtype = config_.checkpoint.export_dtype;
  options.tokenizer_from = session_.folder;
  options.overwrite = true;
  const auto folder = in_dump_folder(config_, config_.checkpoint.export_folder);
  export_hf(*session_.store, session_.spec.config.to_json(config_.checkpoint.export_dtype), folder, options);
  log_.info("model written to {}", folder.string());
}

Trainer::Outcome Trainer::run(const std::atomic<bool>& stop) {
  Outcome outcome;
  RunReport report(config_, step_, data_.steps,
                   measure_peak_flops(config_.training.mixed_precision_param == Dtype::BF16,
                                      config_.training.mixed_precision_param == Dtype::F64),
                   log_);
  const auto evaluate = [&](std::optional<double>& into) {
    into = validate();
    if (into) report.validation(step_, *into);
  };
  evaluate(outcome.validation_before);
  bool evaluated = true;
  while (step_ < data_.steps && !stop) {
    auto step = loader_->next();
    if (!step) break;
    report.step(train_step(std::move(*step)));
    evaluated = false;
    if (due(config_.validator.freq) && step_ < data_.steps) {
      evaluate(outcome.validation_after);
      evaluated = true;
    }
    if (due(config_.checkpoint.interval)) save();
  }
  outcome.step = step_;
  outcome.interrupted = step_ < data_.steps && stop;
  save();
  checkpointer_->wait();
  if (outcome.interrupted) return outcome;
  if (!evaluated) evaluate(outcome.validation_after);
  if (config_.checkpoint.last_save_in_hf) export_model();
  return outcome;
}

}  // namespace titanium
