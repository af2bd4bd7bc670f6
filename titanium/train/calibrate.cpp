#include "titanium/train/calibrate.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <chrono>

#include "titanium/base/error.h"
#include "titanium/batch/pack.h"
#include "titanium/optim/clip.h"
#include "titanium/train/session.h"

namespace titanium {
namespace {

constexpr int kRuns = 5;  // after one that does not count

// Seconds of `work`, the median; all ranks begin together.  `before` each comes what does not count.
double seconds_of(
    const Group& all, const std::function<void()>& work, const std::function<void()>& before = [] {}) {
  std::vector<double> seconds;
  for (int run = 0; run <= kRuns; ++run) {
    before();
    all.barrier();
    const auto begin = std::chrono::steady_clock::now();
    work();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  seconds.erase(seconds.begin());
  std::nth_element(seconds.begin(), seconds.begin() + kRuns / 2, seconds.end());
  return seconds[kRuns / 2];
}

// One micro-batch of the shape: documents one after another, of tokens that do not matter.
PackedBatch batch_of(const StepShape& shape, int64_t vocabulary) {
  std::vector<Sample> documents;
  for (int64_t begin = 0; begin < shape.tokens; begin += shape.document) {
    Sample& sample = documents.emplace_back();
    for (int64_t t = begin; t < std::min(begin + shape.document, shape.tokens); ++t)
      sample.ids.push_back(static_cast<int32_t>(t * 7919 % vocabulary));
    sample.loss_mask.assign(sample.ids.size(), 1);
  }
  const Counts counts = count(documents);
  const std::vector<WeighedSample> weighed = weigh_all(std::move(documents), Averaging::kTokenMean, counts);
  std::vector<const WeighedSample*> list;
  for (const WeighedSample& sample : weighed) list.push_back(&sample);
  return pack_one(list);
}

struct Measured {
  double forward = 0, backward = 0;
};

// A block's forward with its graph, and its backward.
Measured measure_block(const Group& all, const Block& block, const BlockInput& in, const at::Tensor& x) {
  const at::AutoGradMode grad(true);
  const at::Tensor leaf = x.detach().clone().requires_grad_();
  at::Tensor result;
  const auto forward = [&] {
    BlockOutput out;
    const at::Tensor y = block.forward(leaf, in, out);
    result = y.defined() ? y : out.loss;
  };
  const auto backward = [&] { torch::autograd::grad({result}, {leaf}, {at::ones_like(result)}); };
  return {seconds_of(all, forward), seconds_of(all, backward, forward)};
}

Measured measure_attention(const Group& all, const HfConfig& c, const BlockInput& in, at::ScalarType dtype) {
  const at::AutoGradMode grad(true);
  const int64_t T = in.bounds.back();
  const auto heads = [&](int64_t n) { return at::randn({T, n, c.head_dim}).to(dtype).requires_grad_(); };
  const at::Tensor q = heads(c.num_attention_heads), k = heads(c.num_key_value_heads),
                   v = heads(c.num_key_value_heads);
  at::Tensor y;
  const auto forward = [&] { y = attention(q, k, v, {in.bounds, in.bounds, {}, c.window.at(0)}); };
  const auto backward = [&] { torch::autograd::grad({y}, {q, k, v}, {at::ones_like(y)}); };
  return {seconds_of(all, forward), seconds_of(all, backward, forward)};
}

// Bytes/s into a rank, and seconds of a call that moves nothing to speak of.
Hardware::Link measure_links(const Group& all) {
  const auto gather = [&](int64_t bytes) {
    const int64_t n = std::max<int64_t>(1, bytes / 4 / all.size());
    const at::Tensor flat = at::ones({n * all.size()}, at::kFloat);
    return seconds_of(all, [&] { all.all_gather(flat); });
  };
  constexpr int64_t kBytes = int64_t{8} << 20;
  const double few = gather(4), many = gather(kBytes);
  const double moved = static_cast<double>(kBytes) * (all.size() - 1) / all.size();
  return {moved / std::max(many - few, 1e-9), few};
}

}  // namespace

Hardware calibrate(const TrainConfig& config, const StepShape& shape, World& world, Log& log) {
  if (config.training.threads > 0) at::set_num_threads(static_cast<int>(config.training.threads));
  const Group all = world.all();
  TrainConfig alone = config;  // the model whole: rates do not depend on how it is cut
  alone.parallelism = {};
  Session session = open_session(config.model.path, alone, log, /*load_weights=*/false);
  ParamStore& store = *session.store;
  const Model& model = *session.model;
  const at::ScalarType compute = store.dtypes().compute;
  const auto element = static_cast<int64_t>(c10::elementSize(compute));
  const auto touch = [&](int block) {
    for (const int unit : store.units_of_block(block)) {
      const at::Tensor& shard = store.unit(unit).shard();
      shard.copy_(at::randn(shard.sizes(), shard.options())).mul_(0.02);
      store.unit(unit).written();
      store.unit(unit).unshard();
      store.unit(unit).zero_grad();
    }
  };
  const int layer = 1, head = model.block_count() - 1;
  {
    const at::NoGradGuard no_grad;
    touch(layer);
    touch(head);
  }
  const PackedBatch batch = batch_of(shape, model.config.vocab_size);
  BlockInput in = block_input(model, batch, compute, HeadRows::kAll);
  in.keep_cheap = session.step->options().keep_cheap;
  const at::Tensor x = at::randn({shape.tokens, model.config.hidden_size}).to(compute);

  Hardware hw;
  const auto rate = [](double work, double seconds) { return work / std::max(seconds, 1e-9); };
  const Block::Cost cost = model.blocks[layer]->cost(shape.tokens, shape.document, element);
  const Measured attention = measure_attention(all, model.config, in, compute);
  const Measured whole = measure_block(all, *model.blocks[layer], in, x);
  hw.attention = rate(cost.attention, attention.forward);
  hw.attention_backward = rate(kAttentionBackward * cost.attention, attention.backward);
  // What is left of a layer: its products, with the norms and the rest between them.
  hw.matmul = rate(cost.matmul, std::max(whole.forward - attention.forward, 0.1 * whole.forward));
  hw.matmul_backward =
      rate(2 * cost.matmul, std::max(whole.backward - attention.backward, 0.1 * whole.backward));

  BlockInput with_loss = in;
  if (model.head != nullptr) {
    with_loss.nll_weight = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble)
                               .to(compute == at::kDouble ? at::kDouble : at::kFloat);
    const Measured of_head = measure_block(all, *model.blocks[head], with_loss, x);
    hw.head = rate(kHeadProducts * model.blocks[head]->cost(shape.tokens, shape.document, element).head,
                   of_head.forward + of_head.backward);
  } else {
    hw.head = hw.matmul;
  }

  const at::NoGradGuard no_grad;
  const auto optimizer = make_optimizer(store, optimizer_options(config.optimizer));
  double weights = 0;
  for (const auto& unit : store.units()) {
    if (unit->has_grad()) weights += static_cast<double>(unit->shard().numel());
  }
  hw.update = rate(weights * update_bytes(*optimizer, store.dtypes()), seconds_of(all, [&] {
                     const double norm = grad_norm(store).value;
                     optimizer->step({.lr = 1e-6, .clip = clip_coefficient(norm, 1), .zero_grad = true});
                   }));
  const at::Tensor from = at::ones({int64_t{8} << 20}, at::kFloat),
                   to = at::empty(from.sizes(), at::kBFloat16);
  hw.copy = rate(6.0 * static_cast<double>(from.numel()), seconds_of(all, [&] { to.copy_(from); }));
  Hardware::Link link{hw.copy / 3, 1e-5};
  if (all.size() > 1) link = measure_links(all);
  // Ranks of one machine move bytes with the cores that they compute on.
  hw.overlap = false;

  const auto mean = [&](double& value) { value = all.sum(value) / all.size(); };
  for (double* value : {&hw.matmul, &hw.matmul_backward, &hw.attention, &hw.attention_backward, &hw.head,
                        &hw.update, &hw.copy, &link.bandwidth, &link.latency})
    mean(*value);
  hw.dp_shard = hw.dp_replicate = hw.tp = hw.pp = link;
  return hw;
}

}  // namespace titanium
