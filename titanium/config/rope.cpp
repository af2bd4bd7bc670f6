#include "titanium/config/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// Frequencies of dimensions whose wave is longer than the old context are divided by the factor, those of
// short waves stay, the ones between are blended (Llama 3.1).
void scale_llama3(const Rope& rope, std::vector<double>& inv_freq) {
  const auto old_context = static_cast<double>(rope.original_max_position_embeddings);
  const double longest = old_context / rope.low_freq_factor;
  const double shortest = old_context / rope.high_freq_factor;
  for (double& f : inv_freq) {
    const double wave = 2 * std::numbers::pi / f;
    if (wave < shortest) continue;
    if (wave > longest) {
      f /= rope.factor;
      continue;
    }
    const double smooth =
        (old_context / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
    f = (1 - smooth) * f / rope.factor + smooth * f;
  }
}

// The dimension that turns `rotations` times within the old context.
double yarn_dimension(const Rope& rope, double rotations, int64_t head_dim) {
  const auto old_context = static_cast<double>(rope.original_max_position_embeddings);
  return static_cast<double>(head_dim) * std::log(old_context / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

// A linear ramp over dimensions, from frequencies that stay to frequencies divided by the factor
// (arXiv:2309.00071).
void scale_yarn(const Rope& rope, int64_t head_dim, std::vector<double>& inv_freq) {
  double low = yarn_dimension(rope, rope.beta_fast, head_dim);
  double high = yarn_dimension(rope, rope.beta_slow, head_dim);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inv_freq[i] = inv_freq[i] / rope.factor * ramp + inv_freq[i] * (1 - ramp);
  }
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_factor(const Rope& rope) {
  if (rope.attention_factor) return *rope.attention_factor;
  const double above = rope.mscale.value_or(0), below = rope.mscale_all_dim.value_or(0);
  if (above != 0 && below != 0) return yarn_mscale(rope.factor, above) / yarn_mscale(rope.factor, below);
  return yarn_mscale(rope.factor, 1);
}

}  // namespace

const char* name(RopeType type) {
  switch (type) {
    case RopeType::kDefault:
      return "default";
    case RopeType::kLinear:
      return "linear";
    case RopeType::kLlama3:
      return "llama3";
    case RopeType::kYarn:
      return "yarn";
  }
  return "unknown";
}

RopeTable rope_table(const Rope& rope, int64_t head_dim) {
  if (head_dim <= 0 || head_dim % 2 != 0)
    throw Bug("rope_table: head_dim {} is not positive and even", head_dim);
  RopeTable table;
  table.inv_freq.resize(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < table.inv_freq.size(); ++i) {
    table.inv_freq[i] = std::pow(rope.theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
  }
  switch (rope.type) {
    case RopeType::kDefault:
      break;
    case RopeType::kLinear:
      for (double& f : table.inv_freq) f /= rope.factor;
      break;
    case RopeType::kLlama3:
      scale_llama3(rope, table.inv_freq);
      break;
    case RopeType::kYarn:
      scale_yarn(rope, head_dim, table.inv_freq);
      table.attention_factor = yarn_attention_factor(rope);
      break;
  }
  return table;
}

}  // namespace titanium
