#include "titanium/engine/titan_engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/engine/cut.h"
#include "titanium/engine/over_ranks.h"
#include "titanium/ops/allocator.h"
#include "titanium/optim/clip.h"

namespace titanium {
namespace {

// Rows of samples out of the micro-batches' statistics.
Jagged jagged(const std::vector<PackedBatch>& batches, const std::vector<TokenStats>& stats,
              at::Tensor TokenStats::*member, const std::vector<Sample>& samples, at::ScalarType dtype) {
  Jagged out;
  for (const Sample& sample : samples) out.offsets.push_back(out.offsets.back() + sample.size());
  out.values = at::zeros({out.offsets.back()}, dtype);
  for (size_t b = 0; b < batches.size(); ++b) {
    const PackedBatch& batch = batches[b];
    for (int64_t d = 0; d < batch.documents(); ++d) {
      const int64_t sample = batch.sample[static_cast<size_t>(d)];
      if (sample == kFiller) continue;
      const int64_t begin = batch.bounds[static_cast<size_t>(d)],
                    n = samples[static_cast<size_t>(sample)].size();
      out.row(sample).copy_((stats[b].*member).narrow(0, begin, n));
    }
  }
  return out;
}

}  // namespace

TitanEngine::TitanEngine(ModelHead head, EngineConfig config, std::string device, Log& log,
                         std::shared_ptr<World> world)
    : head_(head),
      config_(std::move(config)),
      device_(std::move(device)),
      log_(log),
      world_(world ? std::move(world) : solo_world()) {
  config_.engine.dims.world_size = world_->size();
  config_.engine.dims.resolve();
  agree_on(world_->all(), "the engine config", config_.compared);
  mesh_ = Mesh(config_.engine.dims, world_);
  agree(world_->all(),
        [&] { last_stage_ = last_stage_rank(config_.engine.pipeline, config_.engine.dims.pp); });
  const EngineOptimizerConfig& o = config_.optimizer;
  groups_ = {{o.lr, o.beta1, o.beta2, o.eps, o.weight_decay}};
}

TitanEngine::~TitanEngine() = default;

void TitanEngine::set_total_training_steps(int64_t steps) {
  if (session_)
    throw BadConfig("total_training_steps is given after initialize(), which has made the schedule of it");
  if (steps < 1) throw BadConfig("optimizer.total_training_steps = {}: allowed: an integer >= 1", steps);
  config_.optimizer.total_training_steps = steps;
}

SessionOptions TitanEngine::session_options() const {
  const EngineRunConfig& e = config_.engine;
  TrainConfig like;  // one place reads these names
  like.activation_checkpoint.mode = e.activation_checkpoint;
  like.parallelism.fsdp_reshard_after_forward = e.reshard_after_forward;
  like.parallelism.fsdp_reduce = e.fsdp_reduce;
  SessionOptions options;
  options.dims = e.dims;
  options.world = world_;
  options.dtypes = {scalar_type(e.model_dtype), scalar_type(e.dtype), scalar_type(e.reduce_dtype)};
  options.step = step_options(like);
  options.step.plan.prefetch = e.forward_prefetch ? 1 : 0;
  if (!e.forward_only) options.freeze = config_.model.freeze;
  options.freeze_key = "model.freeze";
  options.pipeline = e.pipeline;
  options.head = head_;
  options.override_config = config_.model.override_config;
  if (!options.override_config.is_object()) options.override_config = Json::object();
  options.seed = e.seed;
  return options;
}

void TitanEngine::initialize() {
  if (session_) throw BadConfig("initialize() is called twice");
  std::unique_ptr<LRSchedulersContainer> schedule;
  if (!config_.engine.forward_only)
    schedule = std::make_unique<LRSchedulersContainer>(config_.optimizer.schedule(), config_.optimizer.lr);
  auto session = std::make_unique<Session>(open_session(config_.model.path, session_options(), log_));
  for (const std::string& note : config_.notes) log_.info("{}", note);
  if (schedule) {
    OptimizerOptions options;
    options.name = config_.optimizer.name;
    options.momentum = config_.optimizer.momentum;
    options.beta1 = groups_[0].beta1;
    options.beta2 = groups_[0].beta2;
    options.eps = groups_[0].eps;
    options.weight_decay = groups_[0].weight_decay;
    optimizer_ = make_optimizer(*session->store, options);
    groups_[0].lr = schedule->lr();
  }
  schedule_ = std::move(schedule);
  session_ = std::move(session);
  if (config_.engine.param_offload) session_->store->release_casts();
}

void TitanEngine::require_initialized(const char* call) const {
  if (!session_) throw BadConfig("{} before initialize()", call);
}

void TitanEngine::require_optimizer(const char* call) const {
  require_initialized(call);
  if (!optimizer_) throw BadConfig("{}: engine.forward_only = true, so there is no optimizer", call);
}

void TitanEngine::enter_mode(Mode mode, ModeOptions options) {
  if (mode == Mode::kNone) throw Bug("a scope of no mode");
  require_initialized("a mode scope");
  const bool inside =
      std::any_of(scopes_.begin(), scopes_.end(), [](const Scope& scope) { return scope.offloads; });
  // On this device loading is what the first use of a weight does.
  scopes_.push_back(
      {mode, options, config_.engine.param_offload && !options.disable_auto_offload && !inside});
}

void TitanEngine::exit_mode(bool failed) {
  if (scopes_.empty()) throw Bug("a mode scope ends that has not begun");
  const Scope scope = scopes_.back();
  scopes_.pop_back();
  if (scope.mode == Mode::kTrain && (failed || scope.options.zero_grad_on_exit)) zero_gradients();
  if (scope.offloads) {
    session_->store->release_casts();
    if (!gradients_) session_->store->release_grad();
    release_free_blocks();
  }
}

void TitanEngine::to(const std::string& device, bool model, bool optimizer, bool grad) {
  if (device != "cpu" && device != device_)
    throw BadConfig("to(\"{}\"): allowed: {}", device, device_ == "cpu" ? device_ : "cpu, " + device_);
  if (grad && !model) throw BadConfig("to(\"{}\"): gradients move with the model or not at all", device);
  (void)optimizer;  // its state is on the host already
  if (!session_) return;
  if (model) session_->store->release_casts();
  if (grad && !gradients_) session_->store->release_grad();
  release_free_blocks();
}

void TitanEngine::zero_gradients() {
  if (gradients_) session_->store->zero_grad();
  gradients_ = false;
}

void TitanEngine::optimizer_zero_grad() {
  require_initialized("optimizer_zero_grad");
  zero_gradients();
}

void TitanEngine::apply_groups() {
  std::string lines;
  for (const ParamGroup& g : groups_) {
    lines += fmt::format("lr = {}\nbetas = {}, {}\neps = {}\nweight_decay = {}\n", g.lr, g.beta1, g.beta2,
                         g.eps, g.weight_decay);
  }
  agree_on(world_->all(), "param_groups", lines);
  if (groups_.size() != 1)
    throw BadConfig("param_groups has {} groups: there is one, of all weights", groups_.size());
  const ParamGroup& group = groups_[0];
  if (!std::isfinite(group.lr) || group.lr < 0)
    throw BadConfig("param_groups[0].lr = {}: allowed: a number >= 0", group.lr);
  OptimizerOptions options = optimizer_->options();
  const ParamGroup now{group.lr, options.beta1, options.beta2, options.eps, options.weight_decay};
  if (now == group) return;
  options.beta1 = group.beta1;
  options.beta2 = group.beta2;
  options.eps = group.eps;
  options.weight_decay = group.weight_decay;
  optimizer_->set_options(options);
}

double TitanEngine::step(bool zero_grad) {
  require_optimizer("optimizer_step");
  apply_groups();
  if (!gradients_) return 0;
  const GradNorm norm = grad_norm(*session_->store);
  if (!norm.finite()) {
    log_.warn("{}; the update is skipped and the gradients are zeroed", norm.describe());
    zero_gradients();
    return norm.value;
  }
  optimizer_->step({.lr = groups_[0].lr,
                    .clip = clip_coefficient(norm.value, config_.optimizer.clip_grad),
                    .zero_grad = zero_grad});
  if (zero_grad) gradients_ = false;
  return norm.value;
}

double TitanEngine::optimizer_step() {
  return step(/*zero_grad=*/false);
}

double TitanEngine::lr_scheduler_step() {
  require_optimizer("lr_scheduler_step");
  schedule_->step();
  return groups_.at(0).lr = schedule_->lr();
}

void TitanEngine::check_samples(const EngineBatch& batch) const {
  const int64_t vocabulary = session_->spec.config.vocab_size;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const Sample& sample = batch.samples[i];
    if (config_.engine.max_seq_len > 0 && sample.size() > config_.engine.max_seq_len) {
      throw BadData("sample {} has {} tokens, more than engine.max_seq_len = {}", i, sample.size(),
                    config_.engine.max_seq_len);
    }
    for (size_t t = 0; t < sample.ids.size(); ++t) {
      if (sample.ids[t] < 0 || sample.ids[t] >= vocabulary) {
        throw BadData("sample {}: token {} has id {}; the model's ids are 0 to {}", i, t, sample.ids[t],
                      vocabulary - 1);
      }
    }
  }
  if (batch.temperature && !is_temperature(*batch.temperature))
    throw BadData("temperature {} is not finite and > 0 (at least {})", *batch.temperature,
                  kLeastTemperature);
}

// What all ranks give alike, in lines.
std::string TitanEngine::arguments(const EngineBatch& batch, const Loss* loss, bool forward_only) const {
  std::string out = loss ? loss->settings() : "loss none";
  const auto line = [&](const char* key, const auto& value) { out += fmt::format("\n{} = {}", key, value); };
  line("mode", name(mode()));
  line("forward_only", forward_only);
  line("temperature of all samples", batch.temperature.has_value());
  line("given micro-batches", !batch.micro.given.empty());
  line("micro_batch_size_per_gpu", batch.micro.sequences);
  line("max_token_len_per_gpu", batch.micro.max_tokens);
  line("a multiple of micro-batches", batch.micro.count_divisor);
  line("calculate_entropy", batch.calculate_entropy);
  line("calculate_sum_pi_squared", batch.calculate_sum_pi_squared);
  line("return_model_output", batch.return_model_output);
  const Counts counts = batch.counts.value_or(Counts{-1, -1, -1});
  line("counts", fmt::format("{} tokens, {} sequences, {} untrained", counts.tokens, counts.sequences,
                             counts.untrained));
  return out;
}

void TitanEngine::check_counts(const Counts& given, const Counts& own) const {
  constexpr int64_t kMost = int64_t{1} << 53;  // they become weights, in double
  if (given.tokens >= own.tokens && given.sequences >= own.sequences && given.untrained >= 0 &&
      given.tokens <= kMost && given.sequences <= kMost && given.untrained <= kMost &&
      given.sequences + given.untrained >= own.sequences + own.untrained)
    return;
  throw BadData(
      "the global batch is said to have {} trained tokens in {} sequences and {} sequences without any; "
      "{} in {} and {} without are here (allowed: at least these, up to 2^53)",
      given.tokens, given.sequences, given.untrained, own.tokens, own.sequences, own.untrained);
}

std::vector<PackedBatch> TitanEngine::pack_batch(const EngineBatch& batch, const Loss* loss,
                                                 bool forward_only) const {
  std::vector<Sample> samples = batch.samples;
  for (size_t i = 0; i < samples.size(); ++i) {
    samples[i].index = static_cast<int64_t>(i);
    if (batch.temperature) samples[i].temperature = *batch.temperature;
  }
  const GlobalBatch global = meet(mesh_, arguments(batch, loss, forward_only), samples);
  if (batch.counts) check_counts(*batch.counts, global.counts);
  const Counts counts = batch.counts.value_or(global.counts);
  MicroBatching micro;
  std::vector<WeighedSample> weighed;
  agree(world_->all(), [&] {
    micro = resolve(batch.micro, config_.engine, forward_only);
    weighed = loss ? weigh_all(std::move(samples), loss->averaging(), counts, loss->scale_factor())
                   : weigh_all(std::move(samples), Averaging::kTokenMean, counts);
  });
  const bool keep_groups = loss && loss->granularity() == Granularity::kGroup;
  const auto cut_here = [&](int64_t at_least) {
    return agreed(world_->all(), [&] { return cut(weighed, micro, config_.engine, keep_groups, at_least); });
  };
  std::vector<PackedBatch> batches = equal_in_number(mesh_.data(), cut_here, mesh_.tp().size());
  for (PackedBatch& one : batches) {
    one.first_sample = global.first;
    one.update = optimizer_ ? optimizer_->updates() : 0;
  }
  return batches;
}

EngineOutput TitanEngine::forward_backward_batch(const EngineBatch& batch, const Loss* loss,
                                                 bool forward_only) {
  require_initialized("forward_backward_batch");
  agree(world_->all(), [&] {
    if (!forward_only) {
      require_optimizer("forward_backward_batch with a backward");
      if (!loss) throw BadConfig("forward_backward_batch: a backward needs a loss");
    }
    check_asked(batch, loss);
    check_samples(batch);
  });
  const std::vector<PackedBatch> batches = pack_batch(batch, loss, forward_only);
  const bool returns = forward_only || batch.return_model_output;
  EngineOutput out;
  WorkResult result;
  if (!batches.empty()) {
    StepRequest request;
    request.loss = loss;
    request.forward_only = forward_only;
    if (returns || !loss->weighted_nll()) {  // else nobody would see them, and the head is faster without
      request.wants.entropy = batch.calculate_entropy;
      request.wants.sum_pi_squared = batch.calculate_sum_pi_squared;
    }
    // A value after the last token is a value too.
    request.rows = !returns && !loss->wants_all_labels() ? HeadRows::kWeighted
                   : head_ == ModelHead::kValue          ? HeadRows::kAll
                                                         : HeadRows::kLabelled;
    gradients_ = gradients_ || !forward_only;
    try {
      result = session_->step->run(batches, request);
    } catch (...) {
      if (!forward_only) zero_gradients();  // half a sum is of no use
      throw;
    }
    out.loss = loss ? std::move(result.losses) : std::vector<double>();
    out.metrics = sum_over(mesh_.data(), result.loss.reports);
  }
  if (!returns) return out;
  const at::ScalarType dtype = config_.engine.dtype == Dtype::F64 ? at::kDouble : at::kFloat;
  for (const auto& [name, member] : outputs()) {
    const bool asked = name == "entropy"          ? batch.calculate_entropy
                       : name == "sum_pi_squared" ? batch.calculate_sum_pi_squared
                                                  : true;
    if (asked) out.model_output[name] = jagged(batches, result.stats, member, batch.samples, dtype);
  }
  return out;
}

EngineOutput TitanEngine::train_batch(const EngineBatch& batch, const Loss& loss) {
  optimizer_zero_grad();
  EngineOutput output = forward_backward_batch(batch, &loss, /*forward_only=*/false);
  output.metrics["grad_norm"] = Report::mean(step(/*zero_grad=*/true), 1);
  return output;
}

std::pair<TensorStream, std::optional<Json>> TitanEngine::get_per_tensor_param(const SyncOptions& options) {
  agree(world_->all(), [&] { require_initialized("get_per_tensor_param"); });
  return {titanium::get_per_tensor_param(*session_->store, options), std::nullopt};
}

void TitanEngineWithLMHead::check_asked(const EngineBatch&, const Loss*) const {}

std::vector<std::pair<std::string, at::Tensor TokenStats::*>> TitanEngineWithLMHead::outputs() const {
  return {{"log_probs", &TokenStats::logprob},
          {"entropy", &TokenStats::entropy},
          {"sum_pi_squared", &TokenStats::sum_pi_squared}};
}

void TitanEngineWithValueHead::check_asked(const EngineBatch& batch, const Loss* loss) const {
  const HeadWants wants = loss ? loss->wants() : HeadWants();
  if (batch.calculate_entropy || batch.calculate_sum_pi_squared || wants.entropy || wants.sum_pi_squared ||
      (loss && loss->weighted_nll()))
    throw BadConfig(
        "a value_model engine has no log-probs, entropy or sum_pi_squared: its statistic is the value");
}

std::vector<std::pair<std::string, at::Tensor TokenStats::*>> TitanEngineWithValueHead::outputs() const {
  return {{"values", &TokenStats::value}};
}

}  // namespace titanium
