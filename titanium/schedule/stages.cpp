#include "titanium/schedule/stages.h"

#include <algorithm>
#include <limits>
#include <set>

#include "titanium/base/error.h"

namespace titanium {
namespace {
constexpr double kRounding = 1e-12;  // sums that differ by less are equal
}

void check_stage_count(int64_t stages, int64_t blocks) {
  if (stages < 1 || stages > blocks) {
    throw BadConfig(
        "a pipeline of {} stages (see pipeline_parallel_layers_per_stage): the model has {} blocks "
        "(embedding, layers, head), so at most {} stages are possible",
        stages, blocks, blocks);
  }
}

std::vector<int32_t> split_by_cost(const std::vector<double>& costs, int32_t stages) {
  const auto blocks = static_cast<int32_t>(costs.size());
  check_stage_count(stages, blocks);
  std::vector<double> before(costs.size() + 1, 0);
  for (int32_t b = 0; b < blocks; ++b) before[b + 1] = before[b] + costs[b];
  const auto cost = [&](int32_t b, int32_t end) { return before[end] - before[b]; };
  const double never = std::numeric_limits<double>::infinity();
  using Table = std::vector<std::vector<double>>;  // [s][b]: of s stages of the blocks from b on
  Table highest(stages + 1, std::vector<double>(blocks + 1, never)), squares = highest;
  highest[0][blocks] = squares[0][blocks] = 0;
  // The least that the most expensive stage can cost.
  for (int32_t s = 1; s <= stages; ++s) {
    for (int32_t b = 0; b < blocks; ++b) {
      for (int32_t end = b + 1; end <= blocks && cost(b, end) < highest[s][b]; ++end)
        highest[s][b] = std::min(highest[s][b], std::max(cost(b, end), highest[s - 1][end]));
    }
  }
  // Where one block costs as much as many others, that alone would leave most stages to chance.
  const double most = highest[stages][0] * (1 + kRounding);
  const auto with_first = [&](int32_t s, int32_t b, int32_t end) {
    return cost(b, end) * cost(b, end) + squares[s - 1][end];
  };
  for (int32_t s = 1; s <= stages; ++s) {
    for (int32_t b = 0; b < blocks; ++b) {
      for (int32_t end = b + 1; end <= blocks && cost(b, end) <= most; ++end)
        squares[s][b] = std::min(squares[s][b], with_first(s, b, end));
    }
  }
  std::vector<int32_t> first{0};
  for (int32_t s = stages; s > 1; --s) {
    const double least = squares[s][first.back()] * (1 + kRounding);
    int32_t end = first.back() + 1;
    while (with_first(s, first.back(), end) > least) ++end;
    first.push_back(end);
  }
  return first;
}

std::vector<int32_t> split_by_layers(int32_t layers, int32_t stages, int32_t first_less, int32_t last_less) {
  check_stage_count(stages, layers + 2);
  const int32_t all = layers + first_less + last_less, each = all / stages, more = all % stages;
  std::vector<int32_t> first{0};
  int32_t next = 1;  // block 0 is the embedding
  for (int32_t s = 0; s < stages; ++s) {
    int32_t n = each + (s < more ? 1 : 0);
    if (s == 0) n -= first_less;
    if (s == stages - 1) n -= last_less;
    const bool has_other = s == 0 || s == stages - 1;
    if (n < 0 || (n == 0 && !has_other)) {
      throw BadConfig(
          "{} layers over {} pipeline stages, pipeline_parallel_first_stage_less_layers = {}, "
          "pipeline_parallel_last_stage_less_layers = {}: stage {} would have {} layers",
          layers, stages, first_less, last_less, s, n);
    }
    next += n;
    if (s + 1 < stages) first.push_back(next);
  }
  return first;
}

std::vector<RankPart> split_model(const ModelPart& whole, const std::vector<int32_t>& first_blocks,
                                  const std::vector<int32_t>& rank_of_stage) {
  const auto stages = static_cast<int32_t>(first_blocks.size());
  if (rank_of_stage.size() != first_blocks.size())
    throw Bug("{} stages, {} of them placed", stages, rank_of_stage.size());
  const auto blocks = static_cast<int32_t>(whole.blocks.size());
  const auto end_of = [&](int32_t stage) { return stage + 1 < stages ? first_blocks[stage + 1] : blocks; };
  std::vector<std::set<int32_t>> users(whole.units.size());  // ranks
  std::vector<bool> trains_before(stages, false);
  bool trains = false;
  for (int32_t s = 0; s < stages; ++s) {
    trains_before[s] = trains;
    for (int32_t b = first_blocks[s]; b < end_of(s); ++b) {
      for (const int32_t unit : whole.blocks[b].units) {
        users[unit].insert(rank_of_stage[s]);
        trains = trains || whole.units[unit].trainable;
      }
    }
  }

  std::vector<RankPart> ranks(*std::max_element(rank_of_stage.begin(), rank_of_stage.end()) + 1);
  for (int32_t rank = 0; rank < static_cast<int32_t>(ranks.size()); ++rank) {
    auto& [part, own_blocks, own_units] = ranks[rank];
    std::vector<int32_t> local(whole.units.size(), -1);
    for (size_t unit = 0; unit < whole.units.size(); ++unit) {
      if (!users[unit].contains(rank)) continue;
      local[unit] = static_cast<int32_t>(own_units.size());
      own_units.push_back(static_cast<int32_t>(unit));
      part.units.push_back(whole.units[unit]);
      if (users[unit].size() > 1) part.units.back().spans = static_cast<int32_t>(unit);
    }
    for (int32_t s = 0; s < stages; ++s) {
      if (rank_of_stage[s] != rank) continue;
      const auto here = [&](int32_t other) {
        return other >= 0 && other < stages && rank_of_stage[other] == rank;
      };
      part.stages.push_back({.first_block = static_cast<int32_t>(part.blocks.size()),
                             .block_count = end_of(s) - first_blocks[s],
                             .takes_tokens = s == 0,
                             .has_loss = s + 1 == stages,
                             .trainable_before = trains_before[s],
                             .input_here = here(s - 1),
                             .output_here = here(s + 1),
                             .index = s});
      for (int32_t b = first_blocks[s]; b < end_of(s); ++b) {
        own_blocks.push_back(b);
        part.blocks.push_back(whole.blocks[b]);
        for (int32_t& unit : part.blocks.back().units) unit = local[unit];
      }
    }
  }
  return ranks;
}

}  // namespace titanium
