#include "titanium/schedule/check.h"

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

enum class Transfer : uint8_t { kNone, kStarted, kDone };
enum class Place : uint8_t { kDevice, kLeaving, kHost, kReturning };

// One block and one micro-batch.
struct Cell {
  bool forward = false, recomputed = false;
  bool input_gradient = false, weight_gradient = false;  // done
  Save saved = Save::kNothing;
  Place place = Place::kDevice;
  std::array<Transfer, 4> peers{};  // send_output, recv_input, send_input_grad, recv_output_grad
};

struct UnitState {
  Transfer gather = Transfer::kNone;
  bool used = false;      // since it was gathered
  bool dirty = false;     // holds a gradient that no reduction has taken yet
  bool reducing = false;  // the gradient buffer belongs to a reduction in flight
  bool gathered_before = false, reduced_before = false;  // in this plan
};

class Checker {
 public:
  Checker(const Plan& plan, const PlanTask& task, CheckScope scope)
      : plan_(plan), task_(task), part_(task.part), scope_(scope) {
    validate(task);
    has_backward_ = part_.backward_blocks();
    if (task.forward_only) has_backward_.assign(has_backward_.size(), false);
    cells_.resize(part_.blocks.size() * static_cast<size_t>(task.micro_batches));
    units_.resize(part_.units.size());
    losses_.resize(task.micro_batches);
    for (const PlanStage& stage : part_.stages) {
      for (int32_t b = 0; b < stage.block_count; ++b) stage_of_.push_back(&stage);
    }
  }

  void run() {
    for (at_ = 0; at_ < plan_.size(); ++at_) {
      action_ = &plan_[at_];
      check_fields();
      step();
    }
    check_end();
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw Bug("plan action {} `{}`: {}", at_, to_string(*action_), reason);
  }
  void expect(bool condition, const char* reason) const {
    if (!condition) refuse(reason);
  }

  Cell& cell(int32_t block, int32_t micro_batch) {
    return cells_[static_cast<size_t>(micro_batch) * part_.blocks.size() + static_cast<size_t>(block)];
  }
  // Whether the block has no neighbour here that gives it its input, or the gradient of its output.
  bool first_here(int32_t b) const { return b == stage_of_[b]->first_block && !stage_of_[b]->input_here; }
  bool last_here(int32_t b) const {
    return b == stage_of_[b]->first_block + stage_of_[b]->block_count - 1 && !stage_of_[b]->output_here;
  }

  void check_fields() const;
  void step();

  void unshard();
  void reshard();
  void reduce();
  void forward(Cell& c);
  void recompute(Cell& c);
  void backward(Cell& c);
  void backward_weight(Cell& c);
  void loss();
  void offload(Cell& c);
  void onload(Cell& c);
  void peer(Cell& c);

  void use_units();
  void touch_gradients();
  bool peer_wanted(Kind kind, int32_t block) const;
  void check_end();

  static size_t peer_slot(Kind kind) {
    return static_cast<size_t>(kind) - static_cast<size_t>(Kind::kSendOutput);
  }

  const Plan& plan_;
  const PlanTask& task_;
  const ModelPart& part_;
  const CheckScope scope_;
  std::vector<bool> has_backward_;
  std::vector<const PlanStage*> stage_of_;  // [blocks]
  std::vector<Cell> cells_;                 // [micro-batches, blocks]
  std::vector<UnitState> units_;
  std::vector<bool> losses_;  // [micro-batches]
  size_t at_ = 0;
  const Action* action_ = nullptr;
};

void Checker::check_fields() const {
  const Action& a = *action_;
  const auto in = [](int32_t index, size_t size) { return index >= 0 && static_cast<size_t>(index) < size; };
  if (names_unit(a.kind)) {
    expect(in(a.unit, units_.size()), "there is no such unit");
  } else {
    expect(in(a.micro_batch, losses_.size()), "there is no such micro-batch");
    expect(!names_block(a.kind) || in(a.block, part_.blocks.size()), "there is no such block");
  }
  expect(has_halves(a.kind) == (a.half != Half::kWhole),
         "this kind has a start and a wait, or it has neither");
  expect(a.kind == Kind::kForward || a.save == Save::kNothing, "only a forward keeps or drops");
}

void Checker::step() {
  const Action& a = *action_;
  const auto own = [&]() -> Cell& { return cell(a.block, a.micro_batch); };  // of kinds that name a block
  switch (a.kind) {
    case Kind::kUnshard:
      return unshard();
    case Kind::kReshard:
      return reshard();
    case Kind::kForward:
      return forward(own());
    case Kind::kRecompute:
      return recompute(own());
    case Kind::kBackward:
    case Kind::kBackwardInput:
      return backward(own());
    case Kind::kBackwardWeight:
      return backward_weight(own());
    case Kind::kLoss:
      return loss();
    case Kind::kReduce:
      return reduce();
    case Kind::kOffload:
      return offload(own());
    case Kind::kOnload:
      return onload(own());
    case Kind::kSendOutput:
    case Kind::kRecvInput:
    case Kind::kSendInputGrad:
    case Kind::kRecvOutputGrad:
      return peer(own());
  }
  throw Bug("plan action {}: {} is no kind of action", at_, static_cast<int>(a.kind));
}

void Checker::unshard() {
  UnitState& unit = units_[action_->unit];
  if (action_->half == Half::kStart) {
    expect(unit.gather != Transfer::kStarted, "the unit is being gathered already");
    expect(unit.gather != Transfer::kDone, "the unit is gathered already");
    expect(part_.units[action_->unit].spans < 0 || !unit.gathered_before,
           "the unit spans pipeline ranks and has been gathered in this plan");
    unit.gather = Transfer::kStarted;
    unit.used = false;
    unit.gathered_before = true;
  } else {
    expect(unit.gather == Transfer::kStarted, "no gather of the unit has been started");
    unit.gather = Transfer::kDone;
  }
}

void Checker::reshard() {
  UnitState& unit = units_[action_->unit];
  expect(unit.gather != Transfer::kStarted, "the unit is still being gathered");
  expect(unit.gather == Transfer::kDone, "the unit is not gathered");
  expect(unit.used, "the unit was gathered and not used");
  unit.gather = Transfer::kNone;
}

void Checker::reduce() {
  UnitState& unit = units_[action_->unit];
  if (action_->half == Half::kStart) {
    expect(part_.units[action_->unit].trainable, "the unit has no gradient");
    expect(!unit.reducing, "the unit is being reduced already");
    expect(unit.dirty, "there is no gradient to reduce");
    expect(part_.units[action_->unit].spans < 0 || !unit.reduced_before,
           "the unit spans pipeline ranks and has been reduced in this plan");
    unit.dirty = false;
    unit.reducing = unit.reduced_before = true;
  } else {
    expect(unit.reducing, "no reduction of the unit has been started");
    unit.reducing = false;
  }
}

void Checker::use_units() {
  if (!scope_.gathered) return;
  for (const int32_t u : part_.blocks[action_->block].units) {
    if (units_[u].gather != Transfer::kDone) {
      refuse("unit " + std::to_string(u) +
             (units_[u].gather == Transfer::kStarted ? " is still being gathered" : " is not gathered"));
    }
    units_[u].used = true;
  }
}

void Checker::touch_gradients() {
  for (const int32_t u : part_.blocks[action_->block].units) {
    if (!part_.units[u].trainable) continue;
    if (units_[u].reducing) refuse("the gradient of unit " + std::to_string(u) + " is being reduced");
    units_[u].dirty = true;
  }
}

void Checker::forward(Cell& c) {
  const auto [block, micro_batch, save] = std::tuple(action_->block, action_->micro_batch, action_->save);
  expect(!c.forward, "the block has run already");
  if (!first_here(block)) {
    expect(cell(block - 1, micro_batch).forward, "the block before has not run");
  } else if (!stage_of_[block]->takes_tokens && scope_.sent) {
    expect(c.peers[peer_slot(Kind::kRecvInput)] == Transfer::kDone, "the input has not been received");
  }
  if (has_backward_[block]) {
    expect(save != Save::kNothing, "the backward needs what this forward must keep or drop");
  } else {
    expect(save == Save::kNothing, "no backward follows, so there is nothing to keep or drop");
  }
  expect(save != Save::kInput || part_.blocks[block].droppable, "the block must not be dropped");
  use_units();
  if (adds_in_forward(*action_, part_)) touch_gradients();
  c.forward = true;
  c.saved = save;
}

void Checker::recompute(Cell& c) {
  expect(c.saved != Save::kAll, c.recomputed ? "the block is recomputed already" : "nothing was dropped");
  expect(c.saved == Save::kInput, "there is no input to recompute from");
  expect(c.place == Place::kDevice, "the input is not on the device");
  use_units();
  c.saved = Save::kAll;
  c.recomputed = true;
}

void Checker::backward(Cell& c) {
  const auto [block, micro_batch] = std::pair(action_->block, action_->micro_batch);
  expect(!c.input_gradient, "the backward has run already");
  expect(c.forward, "the forward has not run");
  expect(has_backward_[block],
         "the block has no backward: nothing up to it is trainable, or no gradient is wanted");
  if (!last_here(block)) {
    expect(cell(block + 1, micro_batch).input_gradient, "the backward of the block after has not run");
  } else if (stage_of_[block]->has_loss) {
    expect(losses_[micro_batch], "the loss has not run");
  } else if (scope_.sent) {
    expect(c.peers[peer_slot(Kind::kRecvOutputGrad)] == Transfer::kDone,
           "the gradient of the output has not been received");
  }
  expect(c.saved == Save::kAll, "the block was dropped and has not been recomputed");
  expect(c.place == Place::kDevice, "what the forward saved is not on the device");
  use_units();
  c.input_gradient = true;
  if (action_->kind == Kind::kBackward) {
    touch_gradients();
    c.weight_gradient = true;
    c.saved = Save::kNothing;
  }
}

void Checker::backward_weight(Cell& c) {
  expect(c.input_gradient, "backward_input has not run");
  expect(!c.weight_gradient, "the weight gradients are done already");
  expect(c.place == Place::kDevice, "what the forward saved is not on the device");
  touch_gradients();
  c.weight_gradient = true;
  c.saved = Save::kNothing;
}

void Checker::loss() {
  const int32_t micro_batch = action_->micro_batch;
  expect(!losses_[micro_batch], "the loss has run already");
  const int32_t head = static_cast<int32_t>(part_.blocks.size()) - 1;
  expect(stage_of_[head]->has_loss, "the last stage is on another rank");
  expect(cell(head, micro_batch).forward, "the last block has not run");
  losses_[micro_batch] = true;
}

void Checker::offload(Cell& c) {
  if (action_->half == Half::kStart) {
    expect(c.saved != Save::kNothing, "nothing is saved");
    expect(c.place == Place::kDevice, "it is on its way, or on the host, already");
    c.place = Place::kLeaving;
  } else {
    expect(c.place == Place::kLeaving, "no offload has been started");
    c.place = Place::kHost;
  }
}

void Checker::onload(Cell& c) {
  if (action_->half == Half::kStart) {
    expect(c.place == Place::kHost, "it is not on the host");
    c.place = Place::kReturning;
  } else {
    expect(c.place == Place::kReturning, "no onload has been started");
    c.place = Place::kDevice;
  }
}

bool Checker::peer_wanted(Kind kind, int32_t block) const {
  const PlanStage& stage = *stage_of_[block];
  switch (kind) {
    case Kind::kRecvInput:
      return first_here(block) && stage.receives();
    case Kind::kSendInputGrad:
      return first_here(block) && stage.receives() && stage.trainable_before && has_backward_[block];
    case Kind::kSendOutput:
      return last_here(block) && stage.sends();
    case Kind::kRecvOutputGrad:
      return last_here(block) && stage.sends() && has_backward_[block];
    default:
      return false;
  }
}

void Checker::peer(Cell& c) {
  expect(peer_wanted(action_->kind, action_->block), "no other stage has a part in this");
  Transfer& transfer = c.peers[peer_slot(action_->kind)];
  if (action_->half == Half::kStart) {
    expect(transfer == Transfer::kNone, "it has been started already");
    expect(action_->kind != Kind::kSendOutput || c.forward, "the block has not run");
    expect(action_->kind != Kind::kSendInputGrad || c.input_gradient, "the backward has not run");
    transfer = Transfer::kStarted;
  } else {
    expect(transfer == Transfer::kStarted, "no such transfer is in flight");
    transfer = Transfer::kDone;
  }
}

void Checker::check_end() {
  const auto missing = [&](const std::string& what) {
    throw Bug("plan ends after {} actions{}: {}", plan_.size(),
              plan_.empty() ? "" : " with `" + to_string(plan_.back()) + "`", what);
  };
  for (int32_t m = 0; m < task_.micro_batches; ++m) {
    for (int32_t b = 0; b < static_cast<int32_t>(part_.blocks.size()); ++b) {
      const Cell& c = cell(b, m);
      const auto where = [&] { return "block " + std::to_string(b) + " @" + std::to_string(m); };
      if (!c.forward) missing(where() + " has not run forward");
      if (has_backward_[b] && !c.input_gradient) missing(where() + " has not run backward");
      if (has_backward_[b] && !c.weight_gradient) missing(where() + " has not run backward_weight");
      if (c.place != Place::kDevice) missing(where() + " has bytes on the host");
      for (const Kind kind :
           {Kind::kSendOutput, Kind::kRecvInput, Kind::kSendInputGrad, Kind::kRecvOutputGrad}) {
        const Transfer wanted = peer_wanted(kind, b) && scope_.sent ? Transfer::kDone : Transfer::kNone;
        if (c.peers[peer_slot(kind)] != wanted) missing(where() + " has not finished " + name(kind));
      }
    }
    if (stage_of_.back()->has_loss && !losses_[m]) missing("no loss @" + std::to_string(m));
  }
  for (size_t u = 0; u < units_.size(); ++u) {
    const std::string unit = "unit " + std::to_string(u);
    if (units_[u].gather == Transfer::kStarted) missing(unit + " is being gathered");
    if (units_[u].gather == Transfer::kDone) missing(unit + " is gathered");
    if (units_[u].reducing) missing("the reduction of " + unit + " is in flight");
    if (scope_.reduced && units_[u].dirty) missing("the gradient of " + unit + " has not been reduced");
  }
}

}  // namespace

void check(const Plan& plan, const PlanTask& task, CheckScope scope) {
  Checker(plan, task, scope).run();
}

}  // namespace titanium
