#include "titanium/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/loss/sft.h"
#include "titanium/ops/allocator.h"
#include "titanium/report/format.h"
#include "titanium/train/estimate.h"
#include "titanium/train/micro_batches.h"
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

int use_threads(const TrainingConfig& config) {
  if (config.threads > 0) at::set_num_threads(static_cast<int>(config.threads));
  return at::get_num_threads();
}

}  // namespace

Trainer::Trainer(Config config, Log& log, std::shared_ptr<World> world)
    : config_(std::move(config)),
      log_(log),
      world_(world ? std::move(world) : solo_world()),
      lock_(lock_folder()),
      session_((use_threads(config_.training),
                open_session(config_.model.path, config_, log, /*load_weights=*/false, world_))),
      optimizer_(make_optimizer(*session_.store, optimizer_options(config_.optimizer))),
      checkpointer_(make_checkpointer()),
      loaded_(load_weights()),
      data_(load_data()),
      schedule_((check_schedule(config_, data_.steps), lr_factor(config_.lr_scheduler, data_.steps)),
                config_.optimizer.lr) {
  agree_on(world_->all(), "the data (seed, split and records)", identity().dump());
  if (loaded_) restore(*loaded_);
  agree(world_->all(), [&] { check_export_folder(); });
  const int64_t position = loaded_ ? loaded_->train.at("position").get<int64_t>() : 0;
  loader_ = std::make_unique<Loader>(data_.train, data_.sampler, position);
  summary();
}

Trainer::~Trainer() = default;

// One rank holds it for all.
std::unique_ptr<RunLock> Trainer::lock_folder() const {
  std::string config;
  for (const auto& [key, value] : config_values(config_)) config += fmt::format("{} = {}\n", key, value);
  agree_on(world_->all(), "the config", config);
  return agreed(world_->all(), [&] {
    check_folders();
    return leads() ? std::make_unique<RunLock>(config_.dump_folder) : nullptr;
  });
}

void Trainer::check_export_folder() const {
  if (!config_.checkpoint.last_save_in_hf || !leads()) return;
  try {
    check_hf_export(in_dump_folder(config_, config_.checkpoint.export_folder), export_options());
  } catch (const BadCheckpoint& e) {
    throw BadConfig("checkpoint.export_folder = {}: {}; move it away, or give another name",
                    config_.checkpoint.export_folder, e.what());
  }
}

// A folder that the run reads its weights from must not be one that it replaces.
void Trainer::check_folders() const {
  const auto place = [](const std::filesystem::path& path) {
    std::error_code error;
    const auto known = std::filesystem::weakly_canonical(path, error);
    return (error ? path : known / "").lexically_normal();
  };
  const auto export_folder = place(in_dump_folder(config_, config_.checkpoint.export_folder));
  const std::pair<const char*, std::string> read[] = {
      {"model.path", config_.model.path},
      {"checkpoint.initial_load_path", config_.checkpoint.initial_load_path}};
  for (const auto& [key, path] : read) {
    if (!config_.checkpoint.last_save_in_hf || path.empty() || place(path) != export_folder) continue;
    throw BadConfig(
        "{} = {} is the folder that this run would export to (dump_folder, checkpoint.export_folder = {}): "
        "give "
        "another one",
        key, path, config_.checkpoint.export_folder);
  }
}

std::unique_ptr<Checkpointer> Trainer::make_checkpointer() {
  CheckpointOptions options;
  options.folder = in_dump_folder(config_, config_.checkpoint.folder);
  options.keep_latest_k = config_.checkpoint.keep_latest_k;
  options.async = config_.checkpoint.async_mode == "async";
  return std::make_unique<Checkpointer>(*session_.store, optimizer_.get(), options);
}

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
  if (!latest.found && latest.damaged) {
    throw BadCheckpoint(
        "{}: holds checkpoints, but none that can be read (see the warnings above): mend or remove them, or "
        "give "
        "another dump_folder; this run does not start anew over them",
        folder.string());
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

std::optional<LoadedCheckpoint> Trainer::load_weights() {
  const auto& c = config_.checkpoint;
  world_->progress(0, "loading weights");
  // One rank looks, so that all go on from the same one.
  const std::string found =
      agreed(world_->all(), [&] { return leads() ? resume_from().string() : std::string(); });
  if (const std::filesystem::path checkpoint = world_->all().exchange(found)[0]; !checkpoint.empty()) {
    resumed_ = true;
    return checkpointer_->load(checkpoint);
  }
  if (c.initial_load_in_hf) {
    const auto folder =
        c.initial_load_path.empty() ? session_.folder : std::filesystem::path(c.initial_load_path);
    const HfLoadReport report = load_hf(folder, *session_.store);
    log_.info("{}: {} tensors, {}", folder.string(), report.tensors, human_bytes(report.bytes));
    for (const std::string& ignored : report.ignored)
      log_.info("{}: {} is not used", folder.string(), ignored);
  } else if (c.initial_load_path.empty()) {
    session_.store->init(static_cast<uint64_t>(config_.training.seed));
    log_.info("weights are random, of training.seed = {}", config_.training.seed);
  } else if (c.initial_load_model_only) {
    checkpointer_->load_masters(c.initial_load_path);
    log_.info("weights of {}", c.initial_load_path);
  } else {
    return checkpointer_->load(c.initial_load_path);
  }
  return std::nullopt;
}

TrainingData Trainer::load_data() {
  world_->progress(0, "reading the data");
  return load_training_data(config_, session_, log_);
}

// What a run cannot change between a save and a resume without becoming another run.
Json Trainer::identity() const {
  return {{"seed", config_.training.seed},
          {"shuffle", config_.data.shuffle},
          {"validation_split", config_.data.validation_split},
          {"data_fingerprint", fmt::format("{:016x}", data_.train.fingerprint())}};
}

Json Trainer::train_state() const {
  return {{"position", loader_->position()}, {"identity", identity()}, {"config", config_values(config_)}};
}

void Trainer::restore(const LoadedCheckpoint& loaded) {
  const Json& train = loaded.train;
  const auto position = train.find("position"), before = train.find("identity");
  if (position == train.end() || !position->is_number_integer() || before == train.end() ||
      !before->is_object()) {
    throw BadCheckpoint(
        "the checkpoint of step {} was not saved by `titanium train`: it holds no position in "
        "the data",
        loaded.step);
  }
  const Json now = identity();
  // The data come last: another seed is another split of the same ones.
  for (const std::string key : {"seed", "shuffle", "validation_split", "data_fingerprint"}) {
    const Json was = before->value(key, Json()), value = now.at(key);
    if (was != value) {
      if (key == "data_fingerprint") {
        throw BadConfig(
            "data.path: the records are not those that the checkpoint of step {} was made with "
            "(data_fingerprint {}, now {}): the run would not go on where it stopped. Give the old data in "
            "the "
            "old order, or start anew in another dump_folder",
            loaded.step, was.dump(), value.dump());
      }
      throw BadConfig(
          "the checkpoint of step {} was made with {} = {}, this run has {}: it would not go on where it "
          "stopped. Give the old value, or start anew in another dump_folder",
          loaded.step, key, was.dump(), value.dump());
    }
  }
  if (loaded.step > data_.steps) {
    throw BadConfig(
        "the checkpoint of step {} is past the end of this run, which has {} steps: give more, or "
        "another dump_folder",
        loaded.step, data_.steps);
  }
  step_ = saved_step_ = loaded.step;
  schedule_.set_position(step_);
  log_.info("resumed after {} updates", step_);
  if (resumed_ && step_ == data_.steps) log_.info("the run was complete: no step is left to train");
  const std::string start[] = {"model.path", "checkpoint.initial_load_path", "checkpoint.initial_load_in_hf"};
  const Json config = train.value("config", Json::object());
  for (const auto& [key, value] : config_values(config_)) {
    const Json was = config.is_object() ? config.value(key, Json()) : Json();
    if (!was.is_string() || was == Json(value)) continue;
    log_.info("{} = {}; it was {} when this checkpoint was saved", key, value, was.get<std::string>());
    if (!resumed_ || std::find(std::begin(start), std::end(start), key) == std::end(start)) continue;
    log_.warn(
        "{} = {} does not give this run its weights: they are those of step {} of a run with {}. If this is "
        "to be another run, give another dump_folder than {}",
        key, value, step_, was.get<std::string>(), config_.dump_folder);
  }
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
  if (const auto& pipeline = session_.step->options().pipeline)
    log_.info("pipeline: {}", pipeline->text(session_.model->block_count()));
  const StepShape shape = step_shape(config_.training, session_.store->mesh().dims());
  log_.info("memory: {}", estimate_step(*session_.step, *optimizer_, shape)
                              .ranks.at(session_.store->mesh().at().pp)
                              .memory.text());
}

StepReport Trainer::train_step(Step step) {
  const auto begin = std::chrono::steady_clock::now();
  StepReport report;
  report.step = step_ + 1;
  for (const Sample& sample : step.samples) {
    report.tokens += sample.size();
    report.flops += 3 * session_.model->forward_flops(sample.size());
  }
  const Counts counts = count(step.samples);
  const Mesh& mesh = session_.store->mesh();
  const auto batches = micro_batches(std::move(step.samples), config_.training, counts, mesh);
  report.trained = counts.tokens;
  report.micro_batches = static_cast<int64_t>(batches.size()) * mesh.data().size();
  if (!packing_told_) tell_packing(batches, report.tokens);
  if (counts.tokens == 0) log_.warn("step {}: no token of the global batch has loss", report.step);
  report.loss = mesh.data().sum(session_.step->forward_backward(batches, SftLoss()).loss.item<double>());
  world_->progress(report.step, "norm and update");
  const GradNorm norm = grad_norm(*session_.store);
  report.grad_norm = norm.value;
  report.lr = schedule_.lr();
  report.skipped = !norm.finite();
  if (report.skipped) {
    log_.warn("step {}: {}; the update is skipped", report.step, norm.describe());
    session_.store->zero_grad();
    check_finite();
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

// Once a run: how much of the work is not on tokens of the data.
void Trainer::tell_packing(const std::vector<PackedBatch>& batches, int64_t tokens) {
  packing_told_ = true;
  double computed = 0;
  for (const PackedBatch& batch : batches) computed += static_cast<double>(batch.size());
  const Group& data = session_.store->mesh().data();
  const double all = data.sum(computed), count = data.sum(static_cast<double>(batches.size()));
  log_.info("packing: {} tokens in {} micro-batches, {:.1f} % full; {:.2f} % of what is computed is padding",
            tokens, count,
            100 * all / (count * static_cast<double>(config_.training.max_tokens_per_microbatch)),
            100 * (all - static_cast<double>(tokens)) / all);
}

std::optional<double> Trainer::validate() {
  const Dataset& data = data_.validation_data();
  const auto& records = data_.validation_records;
  if (!config_.validator.enable || records.empty()) return std::nullopt;
  const size_t end = validation_end();
  Counts counts;
  for (size_t i = 0; i < end; ++i) counts += count(std::array{data.sample(records[i])});
  if (counts.tokens == 0) return std::nullopt;
  TrainingConfig mean = config_.training;
  mean.loss_agg_mode = "token-mean";
  // Some micro-batches a pass: enough to fill a pipeline, and memory does not grow with the set.
  const Mesh& mesh = session_.store->mesh();
  const int64_t at_once = config_.training.max_tokens_per_microbatch *
                          std::max<int64_t>(16, int64_t{2} * mesh.data().size() * mesh.pp().size());
  double sum = 0;
  for (size_t i = 0; i < end;) {
    std::vector<Sample> samples;
    for (int64_t tokens = 0; i < end && tokens < at_once; ++i) {
      samples.push_back(data.sample(records[i]));
      samples.back().index = static_cast<int64_t>(samples.size()) - 1;
      tokens += samples.back().size();
    }
    sum += session_.step->forward(micro_batches(std::move(samples), mean, counts, mesh), SftLoss())
               .loss.item<double>();
  }
  return mesh.data().sum(sum);
}

// How many of the validation records are in validator.steps batches, each as large as a step's.
size_t Trainer::validation_end() const {
  const auto& records = data_.validation_records;
  const auto& training = config_.training;
  const int64_t all = static_cast<int64_t>(records.size());
  if (config_.validator.steps <= 0) return records.size();
  if (training.global_batch_size > 0)
    return static_cast<size_t>(std::min(all, config_.validator.steps * training.global_batch_size));
  size_t end = 0;
  for (int64_t batch = 0; batch < config_.validator.steps; ++batch) {
    int64_t room = training.global_batch_tokens;
    while (end < records.size() && (room -= data_.validation_data().length(records[end])) >= 0) ++end;
  }
  return end;
}

void Trainer::save_now() {
  if (!config_.checkpoint.enable || saved_step_ == step_) return;
  saved_step_ = step_;
  checkpointer_->save(step_, train_state());
}

void Trainer::save_failed(const char* why) {
  log_.warn(
      "the checkpoint of step {} could not be saved: {}; training goes on, the next save is due at step {}",
      saved_step_, why, (step_ / config_.checkpoint.interval + 1) * config_.checkpoint.interval);
  saved_step_ = -1;
}

void Trainer::save() {
  world_->progress(step_, "saving");
  check_finite();
  try {
    checkpointer_->wait();  // for the one before, whose failure is no reason to leave out this one
  } catch (const Error& e) {
    save_failed(e.what());
  }
  try {
    save_now();
  } catch (const Error& e) {
    save_failed(e.what());
  }
}

void Trainer::poll_save() {
  const std::exception_ptr error = checkpointer_->take_error();
  if (!error) return;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    save_failed(e.what());
  }
}

std::exception_ptr Trainer::save_at_end() {
  world_->progress(step_, "saving");
  try {
    checkpointer_->wait();
  } catch (const Error& e) {
    log_.warn("the checkpoint of step {} could not be saved: {}", saved_step_, e.what());
    saved_step_ = -1;
  }
  try {
    save_now();
    checkpointer_->wait();
  } catch (const Error& e) {
    log_.error("the last checkpoint, of step {}, could not be saved: {}", step_, e.what());
    return std::current_exception();
  }
  return nullptr;
}

// No update mends weights that are not finite, and no file should hold them.
void Trainer::check_finite() const {
  agree(world_->all(), [&] {
    for (const auto& unit : session_.store->units()) {
      if (unit->shard().numel() == 0) continue;
      const auto [low, high] = at::aminmax(unit->shard());
      if (!std::isfinite(low.item<double>()) || !std::isfinite(high.item<double>())) {
        throw BadData(
            "weights of {} are infinite or NaN after {} updates, so the run stops and saves nothing of them: "
            "lower optimizer.lr, or resume from an older checkpoint",
            unit->name(), step_);
      }
    }
  });
}

HfExportOptions Trainer::export_options() const {
  HfExportOptions options;
  options.dtype = config_.checkpoint.export_dtype;
  options.tokenizer_from = session_.folder;
  options.chat_template = data_.text.own_template;
  options.overwrite = true;
  options.owner = identity().dump();
  return options;
}

void Trainer::export_model() {
  world_->progress(step_, "exporting");
  const auto folder = in_dump_folder(config_, config_.checkpoint.export_folder);
  export_hf(*session_.store, session_.spec.config.to_json(config_.checkpoint.export_dtype), folder,
            export_options());
  release_free_blocks();
  log_.info("model written to {}", folder.string());
}

Trainer::Outcome Trainer::run(const std::atomic<bool>& stop) {
  Outcome outcome;
  outcome.start = step_;
  // Of all ranks, which measure at the same time as they will compute.
  const double peak_flops =
      world_->all().sum(measure_peak_flops(config_.training.mixed_precision_param == Dtype::BF16,
                                           config_.training.mixed_precision_param == Dtype::F64));
  std::optional<RunReport> report;
  agree(world_->all(), [&] {
    if (leads()) report.emplace(config_, step_, data_.steps, peak_flops, log_);
  });
  const auto evaluate = [&](std::optional<double>& into) {
    world_->progress(step_, "validation");
    into = validate();
    release_free_blocks();  // of another shape than a step's
    if (into && report) report->validation(step_, *into);
  };
  // A signal reaches the ranks at different moments; all stop after the same update.
  const auto stopped = [&] { return world_->all().sum(stop ? 1 : 0) > 0; };
  evaluate(outcome.validation_before);
  bool evaluated = true;
  bool stopping = stopped();
  while (step_ < data_.steps && !stopping) {
    world_->progress(step_ + 1, "loading data");
    auto step = agreed(world_->all(), [&] { return loader_->next(world_->size() == 1 ? &stop : nullptr); });
    if (!step) break;
    const StepReport done = train_step(std::move(*step));
    if (report) report->step(done);
    poll_save();
    evaluated = false;
    if (due(config_.validator.freq) && step_ < data_.steps) {
      evaluate(outcome.validation_after);
      evaluated = true;
    }
    if (due(config_.checkpoint.interval)) save();
    stopping = stopped();
  }
  outcome.step = step_;
  outcome.interrupted = step_ < data_.steps && (stopping || (world_->size() == 1 && stop));
  check_finite();
  const std::exception_ptr save_error = save_at_end();
  outcome.saved = config_.checkpoint.enable && !save_error;
  if (!outcome.interrupted) {
    if (!evaluated) evaluate(outcome.validation_after);
    if (config_.checkpoint.last_save_in_hf) export_model();
  }
  if (save_error) std::rethrow_exception(save_error);
  return outcome;
}

}  // namespace titanium
