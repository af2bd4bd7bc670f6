// Three AdamW steps of a model on a layout, and how two such runs must agree (design D5).
#pragma once
#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "titanium/dist/world.h"

namespace titanium::testing {

struct Layout {
  std::string name;
  int replicate = 1, shard = 1, tp = 1;
  int64_t budget = 64;  // tokens of a micro-batch
  std::string recompute = "none";
  std::string reshard = "default";
  bool offload = false;
  int pp = 1;
  std::string schedule = "1F1B", csv = {};  // csv: of tests/data/pipelines, instead of the schedule
  int64_t first_less = -1, last_less = -1, layers_per_stage = 0;
  bool reduce_each = false;             // after each micro-batch
  std::vector<int64_t> documents = {};  // lengths of those of a step; empty: twelve of 2 to 31 tokens
  int ranks() const { return replicate * shard * tp * pp; }
};
inline void PrintTo(const Layout& layout, std::ostream* out) {
  *out << layout.name;
}

// Whole tensors by name, in fp64.
using Tensors = std::map<std::string, at::Tensor>;

struct Outcome {
  std::vector<double> losses, norms;  // of each step
  std::vector<double> logprobs;       // of all labels of each step, added up, in a pass without a loss
  Tensors gradients;                  // of the first step
  std::vector<Tensors> weights;       // after the last step, of every dp_replicate copy
};

// As one rank of `world`, which has layout.ranks() of them; all get the outcome of all.  `model` is one of
// tests/data/models; with "_vocab101" or "_layers6" behind it, one like it with that vocabulary or as many
// layers and random weights; with "_value", a model of values and their loss.  Computes in `compute`; empty:
// in `dtype`, as all else.
Outcome run_layout(const std::shared_ptr<World>& world, const std::string& model, const Layout& layout,
                   const std::string& dtype, const std::string& compute = "");

// With ranks as threads.
Outcome run_layout(const std::string& model, const Layout& layout, const std::string& dtype,
                   const std::string& compute = "");

// Test failures where they differ: in fp64 everything by 1e-9, in fp32 loss and norm by 1e-5.
void expect_equal_fp64(const Outcome& got, const Outcome& want);
void expect_equal_fp32(const Outcome& got, const Outcome& want);
void expect_bitwise(const Outcome& got, const Outcome& want);

}  // namespace titanium::testing
