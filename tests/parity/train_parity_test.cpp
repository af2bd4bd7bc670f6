// Twenty AdamW steps of the qwen3 fixture against transformers and torch.optim.AdamW.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>

#include "titanium/formats/json.h"
#include "titanium/formats/safetensors.h"
#include "titanium/loss/sft.h"
#include "titanium/optim/clip.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

const std::string kData = std::string(TITANIUM_SOURCE_DIR) + "/tests/data/";

at::Tensor read(const SafetensorsFile& file, const std::string& name) {
  const TensorView& view = file.at(name);
  at::Tensor out = at::empty(view.shape, at::TensorOptions().dtype(scalar_type(view.dtype)));
  std::memcpy(out.data_ptr(), view.data, view.nbytes);
  return out;
}

PackedBatch reference_batch(const SafetensorsFile& expected) {
  const auto ids = [&](const std::string& name) {
    const at::Tensor t = read(expected, name).to(at::kLong);
    return std::vector<int64_t>(t.data_ptr<int64_t>(), t.data_ptr<int64_t>() + t.numel());
  };
  const at::Tensor mask = read(expected, "packed.loss_mask").to(at::kDouble), weight = mask / mask.sum();
  PackedBatch batch;
  batch.tokens = ids("packed.input_ids");
  batch.positions = ids("packed.position_ids");
  batch.bounds = ids("packed.cu_seqlens");
  batch.labels = ids("packed.target_ids");
  for (int64_t& label : batch.labels) label = std::max(label, kNoLabel);
  batch.weight.assign(weight.data_ptr<double>(), weight.data_ptr<double>() + weight.numel());
  return batch;
}

TEST(TrainParity, TwentyAdamWSteps) {
  const SafetensorsFile expected(kData + "models/qwen3/expected.safetensors");
  const SafetensorsFile curve(kData + "optim/adamw_qwen3.safetensors");
  Json meta;
  for (const Json& entry : read_json(kData + "optim/meta.json")) {
    if (entry.at("file") == "adamw_qwen3.safetensors") meta = entry;
  }
  const Json& allowed = meta.at("tolerances");
  TrainConfig config = load_train_config(std::nullopt, {"training.mixed_precision_param=float32"});
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  Session session = open_session(kData + "models/qwen3", config, log);
  config.optimizer.eps = meta.at("eps");
  config.optimizer.weight_decay = meta.at("weight_decay");
  config.optimizer.beta1 = meta.at("betas")[0];
  config.optimizer.beta2 = meta.at("betas")[1];
  const auto optimizer = make_optimizer(*session.store, optimizer_options(config.optimizer));
  const at::Tensor lr = read(curve, "lr"), losses = read(curve, "f64.loss"),
                   norms = read(curve, "f64.grad_norm");
  const std::vector<PackedBatch> batches = {reference_batch(expected)};

  for (int64_t step = 0; step < meta.at("steps").get<int64_t>(); ++step) {
    const double loss = session.step->forward_backward(batches, SftLoss()).loss.item<double>();
    const double norm = grad_norm(*session.store).value;
    EXPECT_NEAR(loss, losses[step].item<double>(),
                allowed.at(step < 5 ? "loss_atol_first5" : "loss_atol").get<double>())
        << step;
    EXPECT_NEAR(norm / norms[step].item<double>(), 1, allowed.at("grad_norm_rtol").get<double>()) << step;
    optimizer->step({.lr = lr[step].item<double>(),
                     .clip = clip_coefficient(norm, meta.at("clip_grad_norm")),
                     .zero_grad = true});
  }
  for (const Slice& slice : session.store->slices()) {
    const at::Tensor want = read(curve, "f32.param_after_step_19." + slice.weight->name()).flatten();
    const at::Tensor got = slice.of(slice.unit->shard());
    EXPECT_LE(((got - want).norm() / want.norm()).item<double>(),
              allowed.at("final_param_rel_l2").get<double>())
        << slice.weight->name();
  }
}

}  // namespace
}  // namespace titanium
