#include "titanium/schedule/run.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <exception>
#include <optional>
#include <tuple>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"

namespace titanium {
namespace {

ModelPart part_of(const Model& model, const ParamStore& store) {
  std::vector<PlanBlock> blocks;
  for (int block = 0; block < model.block_count(); ++block) {
    PlanBlock b;
    for (int unit : store.units_of_block(block)) b.units.push_back(unit);
    b.droppable = block > 0 && block + 1 < model.block_count();
    blocks.push_back(std::move(b));
  }
  std::vector<PlanUnit> units;
  for (const auto& unit : store.units()) units.push_back({unit->trainable()});
  return ModelPart::whole(std::move(blocks), std::move(units));
}

// Before the first action, so that a bad batch leaves no part of a gradient behind.
void check_tokens(const std::vector<PackedBatch>& batches, int64_t vocab) {
  for (const PackedBatch& batch : batches) {
    for (const auto& [what, ids, least] :
         {std::tuple{"token", &batch.tokens, int64_t{0}}, {"label", &batch.labels, kNoLabel}}) {
      for (size_t t = 0; t < ids->size(); ++t) {
        if ((*ids)[t] >= least && (*ids)[t] < vocab) continue;
        throw BadData("{} {} at position {} of a micro-batch: ids of this model are 0 to {}", what, (*ids)[t],
                      t, vocab - 1);
      }
    }
  }
}

// A plan that an exception ends leaves no unit gathered.
class Reshard {
 public:
  explicit Reshard(ParamStore& store) : store_(store) {}
  ~Reshard() {
    if (std::uncaught_exceptions() == exceptions_) return;
    for (const auto& unit : store_.units()) unit->abandon();
  }
  Reshard(const Reshard&) = delete;
  Reshard& operator=(const Reshard&) = delete;

 private:
  ParamStore& store_;
  int exceptions_ = std::uncaught_exceptions();
};

}  // namespace

Executor::Executor(const Model& model, ParamStore& store)
    : model_(model), store_(store), part_(part_of(model, store)), has_backward_(part_.backward_blocks()) {}

WorkResult Executor::run(const Plan& plan, const Work& work) {
  const size_t count = work.batches.size();
  const Mesh& mesh = store_.mesh();
  agree(mesh.all(), [&] { check_tokens(work.batches, model_.config.vocab_size); });
  loss_error_ = nullptr;
  const Reshard reshard(store_);
  World& world = mesh.world();
  WorkResult result;
  result.loss.loss = at::zeros({}, at::kDouble);
  result.stats.resize(count);
  result.losses.resize(count, 0);
  std::vector<std::optional<MicroBatch>> micro(count);
  std::vector<size_t> last(count, 0);
  for (size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].micro_batch >= 0) last.at(plan[i].micro_batch) = i;
  }
  const auto of = [&](const Action& action) -> MicroBatch& {
    auto& m = micro.at(action.micro_batch);
    if (!m) {
      m.emplace();
      m->input = work.input(action.micro_batch);
      m->blocks.resize(model_.blocks.size());
    }
    return *m;
  };
  for (size_t i = 0; i < plan.size(); ++i) {
    const Action& action = plan[i];
    if (world.size() > 1) world.progress(-1, to_string(action));
    const bool starts = action.half != Half::kWait, ends = action.half != Half::kStart;
    switch (action.kind) {
      case Kind::kUnshard:
        if (starts) store_.unit(action.unit).start_unshard();
        if (ends) store_.unit(action.unit).finish_unshard();
        break;
      case Kind::kReshard:
        store_.unit(action.unit).reshard(/*keep_memory=*/store_.unit(action.unit).whole());
        break;
      case Kind::kReduce:
        if (starts) store_.unit(action.unit).start_reduce();
        if (ends) store_.unit(action.unit).finish_reduce();
        break;
      case Kind::kForward:
        forward(action, of(action));
        break;
      case Kind::kRecompute:
        run_block(action.block, of(action));
        break;
      case Kind::kLoss:
        loss(work, action.micro_batch, of(action), result);
        break;
      case Kind::kBackward:
        backward(action, of(action));
        break;
      default:
        throw Bug("plan: '{}' is not for a single stage on one device", to_string(action));
    }
    if (action.micro_batch >= 0 && last[action.micro_batch] == i) micro[action.micro_batch].reset();
  }
  agree(mesh.all(), [&] {
    if (loss_error_) std::rethrow_exception(loss_error_);
  });
  return result;
}

// Runs a block from its saved input with a graph of its own.
void Executor::run_block(int32_t block, MicroBatch& m) {
  const at::AutoGradMode grad(true);
  Saved& saved = m.blocks[block];
  BlockOutput out;
  const at::Tensor y = model_.blocks[block]->forward(saved.input, m.input, out);
  if (y.defined()) {
    saved.outputs = {y};
    m.stream = y.detach();
  } else {
    m.output = std::move(out);
  }
}

void Executor::forward(const Action& action, MicroBatch& m) {
  const at::ScalarType compute = store_.dtypes().compute;
  Saved& saved = m.blocks[action.block];
  saved.input = action.block == 0 ? at::empty({0}, at::TensorOptions().dtype(compute)) : std::move(m.stream);
  m.stream.reset();
  if (action.save == Save::kAll) {
    saved.input.requires_grad_();
    run_block(action.block, m);
    return;
  }
  {
    const at::NoGradGuard no_grad;
    m.stream = model_.blocks[action.block]->forward(saved.input, m.input, m.output);
  }
  if (action.save == Save::kInput) {
    saved.input.requires_grad_();
  } else {
    saved.input.reset();
  }
}

void Executor::loss(const Work& work, int32_t index, MicroBatch& m, WorkResult& result) {
  BlockOutput& out = m.output;
  const auto detached = [](const at::Tensor& t) { return t.defined() ? t.detach() : t; };
  TokenStats now{detached(out.stats.logprob), detached(out.stats.entropy), detached(out.stats.sum_pi_squared),
                 detached(out.stats.value)};
  result.stats[index] = now;
  if (!work.loss) return;
  const PackedBatch& batch = work.batches[index];
  const bool trains = has_backward_.back() && !work.forward_only;
  Saved& head = m.blocks.back();
  std::vector<at::Tensor> leaves;
  const at::AutoGradMode grad(trains && !out.loss.defined());
  if (out.loss.defined()) {  // the head has formed it
    if (trains) {
      head.outputs = {out.loss};
      head.grads = {at::ones_like(out.loss)};
    }
  } else {
    for (auto [stat, output] : {std::pair{&now.logprob, &out.stats.logprob},
                                {&now.entropy, &out.stats.entropy},
                                {&now.sum_pi_squared, &out.stats.sum_pi_squared},
                                {&now.value, &out.stats.value}}) {
      if (!stat->defined() || !output->requires_grad()) continue;
      *stat = stat->detach().requires_grad_();
      if (!trains) continue;
      leaves.push_back(*stat);
      head.outputs.push_back(*output);
    }
  }
  Answer answer = ask(*work.loss, now, batch, leaves);
  if (!leaves.empty()) head.grads = std::move(answer.grads);
  result.loss.loss.add_(answer.sum.loss);
  result.losses[index] = answer.sum.loss.item<double>();
  add_reports(result.loss.reports, answer.sum.reports);
  out = {};
}

Executor::Answer Executor::ask(const Loss& loss, const TokenStats& now, const PackedBatch& batch,
                               const std::vector<at::Tensor>& leaves) {
  const auto here = [&] {
    Answer answer;
    answer.sum = loss(now, batch);
    if (!leaves.empty() && answer.sum.loss.requires_grad()) {  // else it has nothing to train
      answer.grads =
          torch::autograd::grad({answer.sum.loss}, leaves, {}, std::nullopt, false, /*allow_unused=*/true);
    }
    answer.grads.resize(leaves.size());
    answer.sum.loss = answer.sum.loss.detach().to(at::kDouble);
    return answer;
  };
  const bool of_source = loss.on_source_rank();
  Answer answer;
  if (store_.mesh().world().size() == 1) {
    answer = here();
  } else {
    const auto failed = [&](std::exception_ptr error) {
      if (!loss_error_) loss_error_ = std::move(error);
      answer = {};
    };
    try {
      if (!of_source || store_.mesh().tp().rank() == 0) answer = here();
    } catch (const Error&) {
      failed(std::current_exception());
    } catch (const std::exception& e) {
      failed(of_source ? std::make_exception_ptr(BadData("the loss failed: {}", e.what()))
                       : std::current_exception());
    }
    if (!answer.sum.loss.defined()) answer.sum.loss = at::zeros({}, at::kDouble);
  }
  answer.grads.resize(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!answer.grads[i].defined()) answer.grads[i] = at::zeros_like(leaves[i]);
  }
  if (of_source) share(answer);
  return answer;
}

void Executor::share(Answer& answer) const {
  const Group& group = store_.mesh().tp();
  if (group.size() == 1) return;
  const at::NoGradGuard no_grad;
  answer.sum.reports =
      reports_from(group.exchange(group.rank() == 0 ? to_bytes(answer.sum.reports) : "").front());
  std::vector<at::Tensor> parts = {answer.sum.loss.reshape({1})};  // fp64 holds the gradients exactly
  for (const at::Tensor& grad : answer.grads) parts.push_back(grad.to(at::kDouble));
  const at::Tensor flat = at::cat(parts);
  group.broadcast(flat, 0);
  answer.sum.loss = flat[0].clone();
  int64_t begin = 1;
  for (at::Tensor& grad : answer.grads) {
    grad.copy_(flat.narrow(0, begin, grad.numel()));
    begin += grad.numel();
  }
}

void Executor::backward(const Action& action, MicroBatch& m) {
  Saved saved = std::move(m.blocks[action.block]);
  m.blocks[action.block] = {};
  m.stream.reset();
  std::vector<at::Tensor> grad =
      torch::autograd::grad(saved.outputs, {saved.input}, saved.grads, std::nullopt, false,
                            /*allow_unused=*/true);
  if (action.block > 0 && has_backward_[action.block - 1])
    m.blocks[action.block - 1].grads = {std::move(grad[0])};
}

}  // namespace titanium
