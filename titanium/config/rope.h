// Rotary position embedding as config.json describes it, and the frequencies that follow from it.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

namespace titanium {

enum class RopeType { kDefault, kLinear, kLlama3, kYarn };
const char* name(RopeType type);  // transformers' spelling: "default", "linear", "llama3", "yarn"

struct Rope {
  RopeType type = RopeType::kDefault;
  double theta = 10000;
  double factor = 1;                             // all but default: by how much the context grows
  int64_t original_max_position_embeddings = 0;  // llama3, yarn: context length before scaling
  double low_freq_factor = 1;                    // llama3
  double high_freq_factor = 4;                   // llama3
  double beta_fast = 32,
         beta_slow = 1;  // yarn: rotations over the old context where the ramp starts and ends
  std::optional<double> attention_factor;        // yarn; else it follows from factor (and mscale)
  std::optional<double> mscale, mscale_all_dim;  // yarn
  bool truncate = true;                          // yarn: round the ramp's ends to whole dimensions
  bool operator==(const Rope&) const = default;
};

struct RopeTable {
  std::vector<double> inv_freq;  // [head_dim / 2], radians a position
  double attention_factor = 1;   // cos and sin are both multiplied by it
};

// The formulas of transformers' modeling_rope_utils.py (which computes them in float; this is the same in
// double).  head_dim must be even and positive (Bug).
RopeTable rope_table(const Rope& rope, int64_t head_dim);

}  // namespace titanium
