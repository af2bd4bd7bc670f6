// The layout never changes the result (design D5): three AdamW steps on every layout against one rank.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "titanium/dist/run_ranks.h"
#include "titanium/loss/sft.h"
#include "titanium/optim/clip.h"
#include "titanium/train/micro_batches.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

constexpr int kSteps = 3;

struct Layout {
  std::string name;
  int replicate = 1, shard = 1, tp = 1;
  int64_t budget = 64;  // tokens of a micro-batch
  std::string recompute = "none";
  std::string reshard = "default";
  bool offload = false;
  int ranks() const { return replicate * shard * tp; }
};
void PrintTo(const Layout& layout, std::ostream* out) {
  *out << layout.name;
}

// Whole tensors by name.
using Tensors = std::map<std::string, at::Tensor>;

struct Outcome {
  std::vector<double> losses = std::vector<double>(kSteps), norms = std::vector<double>(kSteps);
  Tensors gradients;             // of the first step
  std::vector<Tensors> weights;  // after the last step, of every dp_replicate copy
};

// Twelve documents of 2 to 31 tokens; the same for every layout.
std::vector<Sample> samples_of_step(int step) {
  std::vector<Sample> samples;
  for (int64_t i = 0; i < 12; ++i) {
    Sample sample;
    sample.index = i;
    const int64_t n = 2 + (i * 17 + step * 5) % 30;
    for (int64_t t = 0; t < n; ++t) {
      sample.ids.push_back(static_cast<int32_t>((t * t * 7 + 13 * n + t + 31 * step) % 300));
      sample.loss_mask.push_back((t + i) % 3 != 0);
    }
    samples.push_back(std::move(sample));
  }
  return samples;
}

// Puts a rank's part of every weight where it belongs; an element that nobody owns stays NaN.
void collect(const ParamStore& store, Tensors& into, const std::function<at::Tensor(Unit&)>& flat) {
  for (const auto& weight : store.table().weights()) {
    const auto [entry, is_new] = into.try_emplace(weight->name());
    if (is_new) entry->second = at::full({weight->numel()}, std::nan(""), at::kDouble);
  }
  for (const Slice& slice : store.slices()) {
    const at::Tensor own = slice.of(flat(*slice.unit)).to(at::kDouble);
    slice.each_run([&](const Slice::Run& run) {
      const at::Tensor place = into.at(slice.weight->name()).narrow(0, run.global, run.count);
      ASSERT_TRUE(place.isnan().all().item<bool>()) << slice.weight->name() << " is owned twice";
      place.copy_(own.narrow(0, run.begin, run.count));
    });
  }
}

Outcome train(const std::string& model, const Layout& layout, const std::string& dtype,
              const std::string& compute) {
  Outcome outcome;
  outcome.weights.resize(layout.replicate);
  std::mutex mutex;
  run_ranks(layout.ranks(), [&](std::shared_ptr<World> world) {
    TrainConfig config = load_train_config(
        std::nullopt,
        {"training.mixed_precision_param=" + compute, "training.dtype=" + dtype,
         "training.mixed_precision_reduce=" + dtype, "optimizer.state_dtype=" + dtype, "training.seq_len=32",
         fmt::format("training.max_tokens_per_microbatch={}", layout.budget),
         "activation_checkpoint.mode=" + layout.recompute,
         "parallelism.fsdp_reshard_after_forward=" + layout.reshard,
         fmt::format("training.enable_cpu_offload={}", layout.offload),
         fmt::format("parallelism.data_parallel_replicate_degree={}", layout.replicate),
         fmt::format("parallelism.data_parallel_shard_degree={}", layout.shard),
         fmt::format("parallelism.tensor_parallel_degree={}", layout.tp)});
    LogOptions quiet;
    quiet.level = LogLevel::kOff;
    Log log(quiet);
    const Session session = open_session(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/models/" + model,
                                         config, log, /*load_weights=*/true, world);
    ParamStore& store = *session.store;
    const Mesh& mesh = store.mesh();
    const auto optimizer = make_optimizer(store, optimizer_options(config.optimizer));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<Sample> samples = samples_of_step(step);
      const Counts counts = count(samples);
      const auto batches = micro_batches(std::move(samples), config.training, counts, mesh);
      const double loss =
          mesh.data().sum(session.step->forward_backward(batches, SftLoss()).loss.item<double>());
      const double norm = grad_norm(store).value;
      for (const auto& unit : store.units()) {
        EXPECT_TRUE(!layout.offload || !unit->current().defined()) << unit->name() << " keeps its cast";
      }
      {
        const std::lock_guard lock(mutex);
        outcome.losses[step] = loss;
        outcome.norms[step] = norm;
        if (step == 0 && mesh.at().dp_replicate == 0)
          collect(store, outcome.gradients, [](Unit& unit) { return unit.grad_shard(); });
      }
      optimizer->step({.lr = 1e-3, .clip = clip_coefficient(norm, 1.0), .zero_grad = true});
    }
    const std::lock_guard lock(mutex);
    collect(store, outcome.weights[mesh.at().dp_replicate], [](Unit& unit) { return unit.shard(); });
  });
  return outcome;
}

Outcome train(const std::string& model, const Layout& layout, const std::string& dtype) {
  return train(model, layout, dtype, dtype);
}

void expect_near(const Tensors& got, const Tensors& want, double tolerance, const char* what) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, value] : want) {
    const double difference = (got.at(name) - value).abs().max().item<double>();
    EXPECT_LE(difference, tolerance) << what << " " << name;  // false for NaN
  }
}

const Outcome& one_rank(const std::string& model, const std::string& dtype) {
  static std::map<std::pair<std::string, std::string>, Outcome> known;
  const auto [entry, is_new] = known.try_emplace({model, dtype});
  if (is_new) entry->second = train(model, Layout{"one rank"}, dtype);
  return entry->second;
}

const Layout kLayouts[] = {
    {.name = "micro_batches", .budget = 32},
    {.name = "recompute", .recompute = "full"},
    {.name = "fsdp2", .shard = 2},
    {.name = "fsdp2_always", .shard = 2, .budget = 32, .reshard = "always"},
    {.name = "fsdp2_never_recompute", .shard = 2, .budget = 40, .recompute = "full", .reshard = "never"},
    {.name = "fsdp3", .shard = 3, .budget = 40},
    {.name = "fsdp4", .shard = 4, .recompute = "selective"},
    {.name = "fsdp8", .shard = 8, .budget = 32},
    {.name = "hsdp2x2", .replicate = 2, .shard = 2, .budget = 32},
    {.name = "ddp2", .replicate = 2},
    {.name = "tp2", .tp = 2},
    {.name = "tp3_recompute", .tp = 3, .recompute = "full"},
    {.name = "tp4_micro_batches", .tp = 4, .budget = 40, .recompute = "selective"},
    {.name = "fsdp2_tp2", .shard = 2, .tp = 2, .budget = 40, .reshard = "always"},
    {.name = "hsdp2x2_tp2", .replicate = 2, .shard = 2, .tp = 2, .budget = 32},
    {.name = "ddp2_tp2", .replicate = 2, .tp = 2, .recompute = "full"},
    {.name = "ddp3_micro_batches", .replicate = 3, .budget = 32, .recompute = "full"},
};

class LayoutTable : public testing::TestWithParam<std::tuple<std::string, Layout>> {};

TEST_P(LayoutTable, EqualsOneRankAndItself) {
  const auto& [model, layout] = GetParam();
  const Outcome got = train(model, layout, "float64");
  const Outcome& want = one_rank(model, "float64");
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(got.losses[step], want.losses[step], 1e-9) << "step " << step;
    EXPECT_NEAR(got.norms[step], want.norms[step], 1e-9) << "step " << step;
  }
  expect_near(got.gradients, want.gradients, 1e-9, "gradient");
  for (const Tensors& copy : got.weights) {
    expect_near(copy, want.weights[0], 1e-9, "weight");
    expect_near(copy, got.weights[0], 0, "weight of another copy");
  }
  const Outcome again = train(model, layout, "float64");
  EXPECT_EQ(again.losses, got.losses);
  EXPECT_EQ(again.norms, got.norms);
  expect_near(again.weights[0], got.weights[0], 0, "weight of a second run");

  const Outcome single = train(model, layout, "float32");
  const Outcome& want_single = one_rank(model, "float32");
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(single.losses[step], want_single.losses[step], 1e-5) << "step " << step;
    EXPECT_NEAR(single.norms[step] / want_single.norms[step], 1, 1e-5) << "step " << step;
  }
}

// Weights that are cast anew for every step are the same weights.
TEST(Layouts, OffloadChangesNoBit) {
  for (Layout layout : {Layout{.name = "one rank"}, Layout{.name = "fsdp2", .shard = 2, .budget = 32},
                        Layout{.name = "fsdp2_tp2_never", .shard = 2, .tp = 2, .reshard = "never"},
                        Layout{.name = "ddp2_recompute", .replicate = 2, .recompute = "full"}}) {
    SCOPED_TRACE(layout.name);
    const Outcome want = train("qwen3_tied", layout, "float32", "bfloat16");
    layout.offload = true;
    const Outcome got = train("qwen3_tied", layout, "float32", "bfloat16");
    EXPECT_EQ(got.losses, want.losses);
    EXPECT_EQ(got.norms, want.norms);
    expect_near(got.weights[0], want.weights[0], 0, "weight");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, LayoutTable,
    testing::Combine(testing::Values("llama3", "llama_tied", "qwen2", "qwen3", "qwen3_tied"),
                     testing::ValuesIn(kLayouts)),
    [](const auto& info) { return std::get<0>(info.param) + "_" + std::get<1>(info.param).name; });

}  // namespace
}  // namespace titanium
