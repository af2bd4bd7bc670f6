#include "titanium/schedule/testing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "titanium/base/random.h"

namespace titanium {
namespace {

PlanBlock read_block(const std::string& word) {
  const size_t colon = word.find(':');
  if (colon == std::string::npos) throw std::invalid_argument("no unit in block " + word);
  PlanBlock block{.units = {}, .droppable = word.substr(0, colon) == "layer"};
  std::istringstream units(word.substr(colon + 1));
  for (std::string unit; std::getline(units, unit, ',');) block.units.push_back(std::stoi(unit));
  return block;
}

}  // namespace

PlanCase read_case(std::string_view text) {
  std::vector<PlanBlock> blocks;
  std::vector<int32_t> frozen;
  PlanCase result;
  PlanOptions& o = result.options;
  std::istringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("#: ")) continue;
    std::istringstream in(line.substr(3));
    std::string key, word;
    std::vector<std::string> values;
    in >> key;
    while (in >> word) values.push_back(word);
    const auto number = [&] { return std::stoi(values.at(0)); };
    if (key == "blocks") {
      for (const auto& v : values) blocks.push_back(read_block(v));
    } else if (key == "frozen") {
      for (const auto& v : values) frozen.push_back(std::stoi(v));
    } else if (key == "micro_batches") {
      result.task.micro_batches = number();
    } else if (key == "forward_only") {
      result.task.forward_only = true;
    } else if (key == "recompute") {
      const bool every = values.at(0) != "none" && values[0] != "full";
      o.recompute = every ? Recompute::kEveryNth : values[0] == "full" ? Recompute::kFull : Recompute::kNone;
      if (every) o.recompute_every = number();
    } else if (key == "reshard") {
      o.reshard_after_forward = values.at(0) == "always" ? Reshard::kAlways
                                : values[0] == "never"   ? Reshard::kNever
                                : values[0] == "default" ? Reshard::kDefault
                                                         : throw std::invalid_argument(values[0]);
    } else if (key == "prefetch") {
      o.prefetch = number();
    } else if (key == "reduce") {
      o.reduce = values.at(0) == "each_micro_batch" ? ReduceWhen::kEachMicroBatch : ReduceWhen::kLast;
    } else if (key == "pending_reduces") {
      o.pending_reduces = number();
    } else if (key == "offload") {
      o.offload_every = number();
    } else if (key == "disabled") {
      o.disabled_passes = values;
    } else {
      throw std::invalid_argument("unknown key in a golden file: " + key);
    }
  }
  int32_t unit_count = 0;
  for (const auto& block : blocks) {
    for (const int32_t u : block.units) unit_count = std::max(unit_count, u + 1);
  }
  std::vector<PlanUnit> units(static_cast<size_t>(unit_count));
  for (const int32_t u : frozen) units.at(static_cast<size_t>(u)).trainable = false;
  result.task.part = ModelPart::whole(std::move(blocks), std::move(units));
  return result;
}

ModelPart dense(int32_t layers, bool tied) {
  std::vector<PlanBlock> blocks{{{0}, false}};
  for (int32_t i = 1; i <= layers; ++i) blocks.push_back({{i}, true});
  blocks.push_back({{tied ? 0 : layers + 1}, false});
  return ModelPart::whole(std::move(blocks),
                          std::vector<PlanUnit>(static_cast<size_t>(layers) + (tied ? 1 : 2)));
}

PlanCase random_case(uint64_t seed) {
  const Random random(seed, Purpose::kTest);
  uint64_t counter = 0;
  const auto below = [&](uint64_t bound) { return static_cast<int32_t>(random.below(counter++, bound)); };

  PlanCase result;
  std::vector<PlanBlock> blocks(1 + static_cast<size_t>(below(6)));
  const int32_t unit_count = 1 + below(7);
  const bool plain = below(2) == 0;  // half of the cases look like models, half like nothing in particular
  for (size_t b = 0; b < blocks.size(); ++b) {
    blocks[b].droppable = plain ? b != 0 && b + 1 != blocks.size() : below(4) != 0;
    const int32_t wanted = plain ? 1 : below(3);
    for (int32_t k = 0; k < wanted; ++k) {
      const int32_t u =
          plain ? static_cast<int32_t>(b) % unit_count : below(static_cast<uint64_t>(unit_count));
      auto& units = blocks[b].units;
      if (std::find(units.begin(), units.end(), u) == units.end()) units.push_back(u);
    }
  }
  std::vector<PlanUnit> units(static_cast<size_t>(unit_count));
  const uint64_t frozen = 1 + static_cast<uint64_t>(below(6));
  for (auto& unit : units) unit.trainable = below(frozen) != 1;
  result.task.part = ModelPart::whole(std::move(blocks), std::move(units));
  result.task.micro_batches = 1 + below(4);
  result.task.forward_only = below(5) == 0;

  PlanOptions& o = result.options;
  o.recompute = static_cast<Recompute>(below(3));
  o.recompute_every = 1 + below(4);
  o.reshard_after_forward = static_cast<Reshard>(below(3));
  o.prefetch = below(5);
  o.reduce = static_cast<ReduceWhen>(below(2));
  o.pending_reduces = below(4);
  o.offload_every = below(3);
  for (const char* pass : {"recompute", "offload", "unshard", "reduce"}) {
    if (below(8) == 0) o.disabled_passes.push_back(pass);
  }
  return result;
}

std::string describe(const PlanCase& c) {
  std::string text = "blocks";
  for (const auto& block : c.task.part.blocks) {
    text += fmt::format(" {}:{}", block.droppable ? "layer" : "fixed", fmt::join(block.units, ","));
  }
  text += "; frozen";
  for (size_t u = 0; u < c.task.part.units.size(); ++u) {
    if (!c.task.part.units[u].trainable) text += fmt::format(" {}", u);
  }
  const PlanOptions& o = c.options;
  return text + fmt::format(
                    "; micro_batches {}, forward_only {}, recompute {} every {}, reshard {}, prefetch {}, "
                    "reduce {}, "
                    "pending_reduces {}, offload {}, disabled [{}]",
                    c.task.micro_batches, c.task.forward_only, static_cast<int>(o.recompute),
                    o.recompute_every, static_cast<int>(o.reshard_after_forward), o.prefetch,
                    static_cast<int>(o.reduce), o.pending_reduces, o.offload_every,
                    fmt::join(o.disabled_passes, " "));
}

}  // namespace titanium
