#include "titanium/schedule/run.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <tuple>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"
#include "titanium/schedule/share_result.h"

namespace titanium {
namespace {

ModelPart whole_part(const Model& model, const ParamStore& store) {
  std::vector<PlanBlock> blocks(static_cast<size_t>(model.block_count()));
  std::vector<PlanUnit> units;
  for (const UnitPlace& place : store.places()) {
    for (const int block : place.blocks) blocks[block].units.push_back(static_cast<int32_t>(units.size()));
    units.push_back({place.trainable});
  }
  for (size_t block = 0; block < blocks.size(); ++block)
    blocks[block].droppable = block > 0 && block + 1 < blocks.size();
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

Executor::Executor(const Model& model, ParamStore& store, std::shared_ptr<const StagePlacing> stages)
    : model_(model), store_(store) {
  const ModelPart whole = whole_part(model, store);
  const StagePlacing one{{0}, {0}};
  const StagePlacing& placing = stages ? *stages : one;
  parts_ = split_model(whole, placing.first_blocks, placing.rank_of_stage);
  const Mesh& mesh = store.mesh();
  rank_ = static_cast<size_t>(mesh.at().pp);
  if (parts_.size() != static_cast<size_t>(mesh.pp().size()))
    throw Bug("stages on {} pipeline ranks of {}", parts_.size(), mesh.pp().size());
  last_rank_ = placing.rank_of_stage.back();
  has_backward_ = part().part.backward_blocks();
  // In the order of the stages on all ranks, because making a group may wait for its other member.
  for (size_t s = 0; s + 1 < placing.rank_of_stage.size(); ++s) {
    const int from = placing.rank_of_stage[s], to = placing.rank_of_stage[s + 1], own = mesh.at().pp;
    if (from == to || (own != from && own != to)) continue;
    const int other = own == from ? to : from;
    for (const bool gradient : {false, true}) {
      const Group group =
          mesh.link(other, fmt::format("{} of stage {}", gradient ? "gradient" : "output", s));
      const int sender = gradient ? to : from;  // ranks of a group ascend with pp
      channels_.emplace(std::pair(static_cast<int32_t>(s), gradient),
                        Channel{group, sender > std::min(from, to)});
    }
  }
}

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
      m->blocks.resize(part().blocks.size());
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
      case Kind::kBackwardInput:
        backward(action, of(action));
        break;
      case Kind::kBackwardWeight: {
        const at::NoGradGuard no_grad;
        std::vector<std::function<void()>>& work_left = of(action).blocks[action.block].weight_work;
        for (const auto& one : work_left) one();
        of(action).blocks[action.block] = {};
        break;
      }
      case Kind::kSendOutput:
      case Kind::kRecvInput:
      case Kind::kSendInputGrad:
      case Kind::kRecvOutputGrad:
        transfer(action, work.batches[action.micro_batch], of(action));
        break;
      case Kind::kOffload:
      case Kind::kOnload:
        throw Bug("plan: '{}' is not for one device", to_string(action));
    }
    if (action.micro_batch >= 0 && last[action.micro_batch] == i) micro[action.micro_batch].reset();
  }
  agree(mesh.all(), [&] {
    if (loss_error_) std::rethrow_exception(loss_error_);
  });
  share_result(mesh.pp(), last_rank_, work.batches, store_.dtypes().compute, result);
  return result;
}

void Executor::transfer(const Action& action, const PackedBatch& batch, MicroBatch& m) {
  Transfer& own = m.transfers[{action.kind, action.block}];
  if (action.half == Half::kWait) {
    own.pending.wait();
    if (action.kind == Kind::kRecvInput) m.stream = own.tensor;
    if (action.kind == Kind::kRecvOutputGrad) m.blocks[action.block].grads = {own.tensor};
    m.transfers.erase({action.kind, action.block});
    return;
  }
  const int32_t stage = part().part.stage_of(action.block).index;
  const bool gradient = action.kind == Kind::kSendInputGrad || action.kind == Kind::kRecvOutputGrad;
  const bool at_end = action.kind == Kind::kSendOutput || action.kind == Kind::kRecvOutputGrad;
  const Channel& channel = channels_.at({at_end ? stage : stage - 1, gradient});
  if (action.kind == Kind::kSendOutput) {
    own.tensor = m.stream.contiguous();
    m.stream.reset();
  } else if (action.kind == Kind::kSendInputGrad) {
    own.tensor = m.input_grads.at(action.block).contiguous();
    m.input_grads.erase(action.block);
  } else {
    own.tensor = at::empty({batch.size() / store_.mesh().tp().size(), model_.config.hidden_size},
                           at::TensorOptions().dtype(store_.dtypes().compute));
  }
  own.pending = channel.group.start_broadcast(own.tensor, channel.sender);
}

// Runs a block from its saved input with a graph of its own.
void Executor::run_block(int32_t block, MicroBatch& m) {
  const at::AutoGradMode grad(true);
  Saved& saved = m.blocks[block];
  BlockOutput out;
  const at::Tensor y = this->block(block).forward(saved.input, m.input, out);
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
  saved.input = part().blocks[action.block] == 0 ? at::empty({0}, at::TensorOptions().dtype(compute))
                                                 : std::move(m.stream);
  m.stream.reset();
  if (action.save == Save::kAll) {
    saved.input.requires_grad_();
    run_block(action.block, m);
    return;
  }
  {
    const at::NoGradGuard no_grad;
    m.stream = block(action.block).forward(saved.input, m.input, m.output);
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
  World& world = store_.mesh().world();
  const bool of_source = loss.on_source_rank();
  const auto here = [&] {
    Answer answer;
    // It is as slow as it is, and the ranks that wait shall know for what.
    if (of_source && world.size() > 1) world.progress(-1, "in the caller's loss");
    answer.sum = loss(now, batch);
    if (of_source && world.size() > 1) world.progress(-1, "with the answer of the caller's loss");
    if (!leaves.empty() && answer.sum.loss.requires_grad()) {  // else it has nothing to train
      answer.grads =
          torch::autograd::grad({answer.sum.loss}, leaves, {}, std::nullopt, false, /*allow_unused=*/true);
    }
    answer.grads.resize(leaves.size());
    answer.sum.loss = answer.sum.loss.detach().to(at::kDouble);
    return answer;
  };
  Answer answer;
  if (world.size() == 1) {
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
  const bool split = action.kind == Kind::kBackwardInput;
  if (split) store_.defer_gradients(&m.blocks[action.block].weight_work);
  std::vector<at::Tensor> grad;
  try {
    grad = torch::autograd::grad(saved.outputs, {saved.input}, saved.grads, std::nullopt, false,
                                 /*allow_unused=*/true);
  } catch (...) {
    store_.defer_gradients(nullptr);
    throw;
  }
  store_.defer_gradients(nullptr);
  const PlanStage& stage = part().part.stage_of(action.block);
  if (action.block == stage.first_block && stage.receives()) {
    if (stage.trainable_before) m.input_grads[action.block] = std::move(grad[0]);
  } else if (action.block > 0 && has_backward_[action.block - 1]) {
    m.blocks[action.block - 1].grads = {std::move(grad[0])};
  }
}

}  // namespace titanium
