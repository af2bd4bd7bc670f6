#include "titanium/schedule/action.h"

#include <array>

namespace titanium {
namespace {

struct KindTraits {
  const char* name;
  bool unit, halves, compute, weights, gradient;
};

constexpr std::array<KindTraits, kKindCount> kTraits = {{
    {"unshard", true, true, false, false, false},
    {"reshard", true, false, false, false, false},
    {"forward", false, false, true, true, false},
    {"recompute", false, false, true, true, false},
    {"backward", false, false, true, true, true},
    {"backward_input", false, false, true, true, false},
    {"backward_weight", false, false, true, false, true},
    {"loss", false, false, false, false, false},
    {"reduce", true, true, false, false, false},
    {"offload", false, true, false, false, false},
    {"onload", false, true, false, false, false},
    {"send_output", false, true, false, false, false},
    {"recv_input", false, true, false, false, false},
    {"send_input_grad", false, true, false, false, false},
    {"recv_output_grad", false, true, false, false, false},
}};

const KindTraits& traits(Kind kind) {
  return kTraits[static_cast<size_t>(kind)];
}

}  // namespace

Action Action::of_unit(Kind kind, Half half, int32_t unit) {
  Action action;
  action.kind = kind;
  action.half = half;
  action.unit = unit;
  return action;
}

Action Action::of_block(Kind kind, int32_t block, int32_t micro_batch, Half half) {
  Action action;
  action.kind = kind;
  action.half = half;
  action.block = block;
  action.micro_batch = micro_batch;
  return action;
}

Action Action::forward(int32_t block, int32_t micro_batch, Save save) {
  Action action = of_block(Kind::kForward, block, micro_batch);
  action.save = save;
  return action;
}

Action Action::loss(int32_t micro_batch) {
  Action action;
  action.kind = Kind::kLoss;
  action.micro_batch = micro_batch;
  return action;
}

const char* name(Kind kind) {
  return traits(kind).name;
}
bool names_unit(Kind kind) {
  return traits(kind).unit;
}
bool names_block(Kind kind) {
  return !traits(kind).unit && kind != Kind::kLoss;
}
bool has_halves(Kind kind) {
  return traits(kind).halves;
}
bool is_compute(Kind kind) {
  return traits(kind).compute;
}
bool uses_weights(Kind kind) {
  return traits(kind).weights;
}
bool adds_gradient(Kind kind) {
  return traits(kind).gradient;
}

std::string to_string(const Action& action) {
  std::string text;
  if (action.half != Half::kWhole) text += action.half == Half::kStart ? "> " : ". ";
  text += name(action.kind);
  if (names_unit(action.kind)) text += ' ' + std::to_string(action.unit);
  if (names_block(action.kind)) text += ' ' + std::to_string(action.block);
  if (action.save != Save::kNothing) text += action.save == Save::kAll ? " keep" : " drop";
  if (!names_unit(action.kind)) text += " @" + std::to_string(action.micro_batch);
  return text;
}

}  // namespace titanium
