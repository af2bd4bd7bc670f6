#include "tests/layouts/run_layout.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <mutex>

#include "titanium/dist/run_ranks.h"
#include "titanium/formats/json.h"
#include "titanium/loss/sft.h"
#include "titanium/loss/value_loss.h"
#include "titanium/optim/clip.h"
#include "titanium/train/micro_batches.h"
#include "titanium/train/session.h"

namespace titanium::testing {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = 3;
constexpr std::string_view kVocab101 = "_vocab101", kLayers6 = "_layers6", kValue = "_value";

// The same for every layout.
std::vector<Sample> samples_of_step(const Layout& layout, int step, int64_t vocabulary) {
  std::vector<Sample> samples;
  const auto count = static_cast<int64_t>(layout.documents.empty() ? 12 : layout.documents.size());
  for (int64_t i = 0; i < count; ++i) {
    Sample sample;
    sample.index = i;
    const int64_t n = layout.documents.empty() ? 2 + (i * 17 + step * 5) % 30 : layout.documents[i];
    for (int64_t t = 0; t < n; ++t) {
      sample.ids.push_back(static_cast<int32_t>((t * t * 7 + 13 * n + t + 31 * step + 5 * i) % vocabulary));
      sample.loss_mask.push_back((t + i) % 3 != 0);
      sample.columns["values"].push_back(0.1 * static_cast<double>((t + i) % 5));
      sample.columns["returns"].push_back(0.2 * static_cast<double>((t * 3 + i) % 7) - 0.5);
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

// Where config.json is; made and removed here for a model that is in no folder.
class ModelFolder {
 public:
  explicit ModelFolder(std::string model) {
    const fs::path models = fs::path(TITANIUM_SOURCE_DIR) / "tests/data/models";
    const auto take = [&](std::string_view ending) {
      const bool has = model.ends_with(ending);
      if (has) model.resize(model.size() - ending.size());
      return has;
    };
    value_ = take(kValue);
    const bool vocab101 = take(kVocab101), layers6 = take(kLayers6);
    random_ = vocab101 || layers6;
    path_ = models / model;
    if (!random_) return;
    Json config = read_json(models / model / "config.json");
    if (vocab101) config["vocab_size"] = vocabulary_ = 101;
    if (layers6) {
      config["num_hidden_layers"] = 6;
      config.erase("layer_types");
    }
    static std::atomic<int> count = 0;
    path_ = fs::temp_directory_path() / fmt::format("titanium-layouts-{}-{}", ::getpid(), count++);
    fs::create_directories(path_);
    write_file(path_ / "config.json", config.dump());
  }
  ~ModelFolder() {
    std::error_code ignored;
    if (random_) fs::remove_all(path_, ignored);
  }
  ModelFolder(const ModelFolder&) = delete;
  ModelFolder& operator=(const ModelFolder&) = delete;
  const fs::path& path() const { return path_; }
  bool random() const { return random_; }
  bool value() const { return value_; }
  int64_t vocabulary() const { return vocabulary_; }

 private:
  bool random_ = false, value_ = false;
  int64_t vocabulary_ = 300;
  fs::path path_;
};

TrainConfig config_of(const Layout& layout, const std::string& dtype, const std::string& compute) {
  return load_train_config(
      std::nullopt,
      {"training.mixed_precision_param=" + (compute.empty() ? dtype : compute), "training.dtype=" + dtype,
       "training.mixed_precision_reduce=" + dtype, "optimizer.state_dtype=" + dtype,
       fmt::format("training.seq_len={}", std::min<int64_t>(layout.budget, 32)),
       fmt::format("training.max_tokens_per_microbatch={}", layout.budget),
       "activation_checkpoint.mode=" + layout.recompute,
       "parallelism.fsdp_reshard_after_forward=" + layout.reshard,
       fmt::format("parallelism.fsdp_reduce={}", layout.reduce_each ? "each_micro_batch" : "last"),
       fmt::format("training.enable_cpu_offload={}", layout.offload),
       fmt::format("parallelism.data_parallel_replicate_degree={}", layout.replicate),
       fmt::format("parallelism.data_parallel_shard_degree={}", layout.shard),
       fmt::format("parallelism.pipeline_parallel_degree={}", layout.pp),
       "parallelism.pipeline_parallel_schedule=" + layout.schedule,
       "parallelism.pipeline_parallel_schedule_csv=" +
           (layout.csv.empty() ? "" : TITANIUM_SOURCE_DIR "/tests/data/pipelines/" + layout.csv),
       fmt::format("parallelism.pipeline_parallel_layers_per_stage={}", layout.layers_per_stage),
       fmt::format("parallelism.pipeline_parallel_first_stage_less_layers={}", layout.first_less),
       fmt::format("parallelism.pipeline_parallel_last_stage_less_layers={}", layout.last_less),
       fmt::format("parallelism.tensor_parallel_degree={}", layout.tp)});
}

// The parts of every weight that a rank owns, where they belong, one weight after another; the rest is NaN.
at::Tensor own_parts(const ParamStore& store, const std::function<at::Tensor(Unit&)>& flat) {
  std::map<const Weight*, int64_t> begins;
  int64_t numel = 0;
  for (const auto& weight : store.table().weights()) {
    begins[weight.get()] = numel;
    numel += weight->numel();
  }
  at::Tensor all = at::full({numel}, std::nan(""), at::kDouble);
  for (const Slice& slice : store.slices()) {
    const at::Tensor own = slice.of(flat(*slice.unit)).to(at::kDouble);
    slice.each_run([&](const Slice::Run& run) {
      all.narrow(0, begins.at(slice.weight) + run.global, run.count)
          .copy_(own.narrow(0, run.begin, run.count));
    });
  }
  return all;
}

// From those of all ranks of a copy; an element that nobody owns stays NaN, and equals nothing.
Tensors merged(const Mesh& mesh, const ParamStore& store, const at::Tensor& own, int copy) {
  const bool mine = mesh.at().dp_replicate == copy;
  const std::vector<std::string> all = mesh.all().exchange(
      mine ? std::string(static_cast<const char*>(own.const_data_ptr()), own.nbytes()) : std::string());
  at::Tensor whole = at::full({own.numel()}, std::nan(""), at::kDouble);
  auto* to = whole.data_ptr<double>();
  int64_t twice = 0;
  for (const std::string& bytes : all) {
    for (int64_t i = 0; i < static_cast<int64_t>(bytes.size() / sizeof(double)); ++i) {
      double value = 0;
      std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
      if (std::isnan(value)) continue;
      twice += !std::isnan(to[i]);
      to[i] = value;
    }
  }
  EXPECT_EQ(twice, 0) << "elements have two owners";
  Tensors tensors;
  int64_t begin = 0;
  for (const auto& weight : store.table().weights()) {
    tensors[weight->name()] = whole.narrow(0, begin, weight->numel());
    begin += weight->numel();
  }
  return tensors;
}

// As many on every rank, which is what lets them run in step, and none over the budget (but for what makes
// its length one of whole parts for tensor-parallel ranks).
void check_batches(const std::vector<PackedBatch>& batches, const Layout& layout, const Mesh& mesh) {
  for (const std::string& count : mesh.all().exchange(std::to_string(batches.size())))
    EXPECT_EQ(count, std::to_string(batches.size()));
  for (const PackedBatch& batch : batches) EXPECT_LT(batch.size(), layout.budget + layout.tp);
}

// Or of values.
double sum_of_logprobs(TrainStep& step, const std::vector<PackedBatch>& batches, const Mesh& mesh) {
  double sum = 0;
  for (const TokenStats& stats : step.score(batches, {}, HeadRows::kLabelled))
    sum += (stats.value.defined() ? stats.value : stats.logprob).sum(at::kDouble).item<double>();
  return mesh.data().sum(sum);
}

void expect_near(const Tensors& got, const Tensors& want, double tolerance, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, value] : want) {
    const double difference = (got.at(name) - value).abs().max().item<double>();
    EXPECT_LE(difference, tolerance) << what << " " << name;  // false for NaN
  }
}

}  // namespace

Outcome run_layout(const std::shared_ptr<World>& world, const std::string& model, const Layout& layout,
                   const std::string& dtype, const std::string& compute) {
  const ModelFolder folder(model);
  const TrainConfig config = config_of(layout, dtype, compute);
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  SessionOptions options = session_options(config);
  options.world = world;
  options.load_weights = !folder.random();
  if (folder.value()) options.head = ModelHead::kValue;
  const Session session = open_session(folder.path(), options, log);
  ParamStore& store = *session.store;
  if (folder.random()) store.init(7);
  for (const UnitPlace& place : store.places()) {  // what a plan goes by
    if (place.unit == nullptr) continue;
    const UnitSize size = store.size_of(place);
    EXPECT_EQ(size.numel, place.unit->numel()) << place.unit->name();
    EXPECT_EQ(size.part, place.unit->shard().numel()) << place.unit->name();
    EXPECT_EQ(size.replicas, place.unit->groups().replicas.size()) << place.unit->name();
  }
  const Mesh& mesh = store.mesh();
  const auto optimizer = make_optimizer(store, optimizer_options(config.optimizer));
  const ValueLoss value_loss;
  const SftLoss sft_loss;
  const Loss& loss = folder.value() ? static_cast<const Loss&>(value_loss) : sft_loss;
  Outcome outcome;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Sample> samples = samples_of_step(layout, step, folder.vocabulary());
    const Counts counts = count(samples);
    const auto batches = micro_batches(std::move(samples), config.training, counts, mesh);
    check_batches(batches, layout, mesh);
    outcome.logprobs.push_back(sum_of_logprobs(*session.step, batches, mesh));
    outcome.losses.push_back(
        mesh.data().sum(session.step->forward_backward(batches, loss).loss.item<double>()));
    outcome.norms.push_back(grad_norm(store).value);
    for (const auto& unit : store.units())
      EXPECT_TRUE(!layout.offload || !unit->current().defined()) << unit->name() << " keeps its cast";
    if (step == 0)
      outcome.gradients =
          merged(mesh, store, own_parts(store, [](Unit& unit) { return unit.grad_shard(); }), 0);
    optimizer->step({.lr = 1e-3, .clip = clip_coefficient(outcome.norms.back(), 1.0), .zero_grad = true});
  }
  const at::Tensor own = own_parts(store, [](Unit& unit) { return unit.shard(); });
  for (int copy = 0; copy < layout.replicate; ++copy)
    outcome.weights.push_back(merged(mesh, store, own, copy));
  return outcome;
}

Outcome run_layout(const std::string& model, const Layout& layout, const std::string& dtype,
                   const std::string& compute) {
  Outcome outcome;
  run_ranks(layout.ranks(), [&](std::shared_ptr<World> world) {
    Outcome own = run_layout(world, model, layout, dtype, compute);
    if (world->rank() == 0) outcome = std::move(own);
  });
  return outcome;
}

void expect_equal_fp64(const Outcome& got, const Outcome& want) {
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], 1e-9) << "step " << step;
    EXPECT_NEAR(got.norms[step], want.norms[step], 1e-9) << "step " << step;
    EXPECT_NEAR(got.logprobs[step], want.logprobs[step], 1e-9 * std::abs(want.logprobs[step]))
        << "step " << step;
  }
  expect_near(got.gradients, want.gradients, 1e-9, "gradient");
  for (const Tensors& copy : got.weights) {
    expect_near(copy, want.weights.at(0), 1e-9, "weight");
    expect_near(copy, got.weights.at(0), 0, "weight of another copy");
  }
}

void expect_equal_fp32(const Outcome& got, const Outcome& want) {
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (size_t step = 0; step < want.losses.size(); ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], 1e-5) << "step " << step;
    EXPECT_NEAR(got.norms[step] / want.norms[step], 1, 1e-5) << "step " << step;
  }
}

void expect_bitwise(const Outcome& got, const Outcome& want) {
  EXPECT_EQ(got.losses, want.losses);
  EXPECT_EQ(got.norms, want.norms);
  EXPECT_EQ(got.logprobs, want.logprobs);
  expect_near(got.gradients, want.gradients, 0, "gradient");
  expect_near(got.weights.at(0), want.weights.at(0), 0, "weight");
}

}  // namespace titanium::testing
