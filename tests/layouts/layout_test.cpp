// The layout never changes the result (design D5): three AdamW steps on every layout against one rank.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <tuple>
#include <vector>

#include "tests/layouts/run_layout.h"
#include "titanium/base/error.h"

namespace titanium {
namespace {

using testing::Layout;
using testing::Outcome;
using testing::run_layout;

using Lengths = std::vector<int64_t>;

const Outcome& one_rank(const std::string& model, const std::string& dtype, const Lengths& documents) {
  static std::map<std::tuple<std::string, std::string, Lengths>, Outcome> known;
  const auto [entry, is_new] = known.try_emplace({model, dtype, documents});
  if (is_new) entry->second = run_layout(model, {.name = "one rank", .documents = documents}, dtype);
  return entry->second;
}

const Layout kLayouts[] = {
    {.name = "micro_batches", .budget = 32},
    {.name = "recompute", .recompute = "full"},
    {.name = "fsdp2", .shard = 2},
    {.name = "fsdp2_always", .shard = 2, .budget = 32, .reshard = "always"},
    {.name = "fsdp2_never_recompute", .shard = 2, .budget = 40, .recompute = "full", .reshard = "never"},
    {.name = "fsdp3", .shard = 3, .budget = 40},
    {.name = "fsdp4", .shard = 4, .recompute = "selective"},
    {.name = "fsdp5_always_recompute", .shard = 5, .budget = 32, .recompute = "full", .reshard = "always"},
    {.name = "fsdp8", .shard = 8, .budget = 32},
    {.name = "hsdp2x2", .replicate = 2, .shard = 2, .budget = 32},
    {.name = "hsdp2x3", .replicate = 2, .shard = 3, .recompute = "selective", .reshard = "never"},
    {.name = "hsdp4x2", .replicate = 4, .shard = 2, .budget = 32},
    {.name = "ddp2", .replicate = 2},
    {.name = "ddp4", .replicate = 4},
    {.name = "tp2", .tp = 2},
    {.name = "tp3_recompute", .tp = 3, .recompute = "full"},
    {.name = "tp4_micro_batches", .tp = 4, .budget = 40, .recompute = "selective"},
    {.name = "fsdp2_tp2", .shard = 2, .tp = 2, .budget = 40, .reshard = "always"},
    {.name = "fsdp2_tp3_recompute", .shard = 2, .tp = 3, .recompute = "full"},
    {.name = "fsdp4_tp2", .shard = 4, .tp = 2, .budget = 32, .recompute = "selective"},
    {.name = "hsdp2x2_tp2", .replicate = 2, .shard = 2, .tp = 2, .budget = 32},
    {.name = "ddp2_tp2", .replicate = 2, .tp = 2, .recompute = "full"},
    {.name = "ddp3_micro_batches", .replicate = 3, .budget = 32, .recompute = "full"},
};

class LayoutTable : public ::testing::TestWithParam<std::tuple<std::string, Layout>> {};

TEST_P(LayoutTable, EqualsOneRankAndItself) {
  const auto& [model, layout] = GetParam();
  const Outcome got = run_layout(model, layout, "float64");
  testing::expect_equal_fp64(got, one_rank(model, "float64", layout.documents));
  testing::expect_bitwise(run_layout(model, layout, "float64"), got);
  testing::expect_equal_fp32(run_layout(model, layout, "float32"),
                             one_rank(model, "float32", layout.documents));
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<std::string, Layout>>& info) {
  return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
}

INSTANTIATE_TEST_SUITE_P(Models, LayoutTable,
                         ::testing::Combine(::testing::Values("llama3", "llama_tied", "qwen2", "qwen3",
                                                              "qwen3_tied"),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);

// The models have an embedding, two layers and a head: four stages at most.  C11: micro-batches are of packed
// documents.
const Layout kPipelineLayouts[] = {
    {.name = "pp2_gpipe", .budget = 32, .pp = 2, .schedule = "GPipe"},
    {.name = "pp2_1f1b", .budget = 32, .pp = 2},
    {.name = "pp2_one_micro_batch", .budget = 1024, .pp = 2},
    {.name = "pp3_1f1b_recompute", .budget = 40, .recompute = "full", .pp = 3},
    {.name = "pp4_1f1b", .budget = 32, .pp = 4},
    {.name = "pp2_interleaved", .budget = 32, .pp = 2, .schedule = "Interleaved1F1B"},
    {.name = "pp2_bfs", .budget = 32, .recompute = "selective", .pp = 2, .schedule = "LoopedBFS"},
    {.name = "pp2_zero_bubble", .budget = 32, .pp = 2, .schedule = "InterleavedZeroBubble"},
    {.name = "pp2_zbv", .budget = 32, .pp = 2, .schedule = "ZBVZeroBubble"},
    {.name = "pp2_zbv_recompute", .budget = 40, .recompute = "full", .pp = 2, .schedule = "ZBVZeroBubble"},
    {.name = "pp2_dualpipev", .budget = 32, .pp = 2, .schedule = "DualPipeV"},
    {.name = "pp2_fsdp2", .shard = 2, .budget = 32, .pp = 2},
    {.name = "pp2_fsdp2_always_zbv",
     .shard = 2,
     .budget = 32,
     .reshard = "always",
     .pp = 2,
     .schedule = "ZBVZeroBubble"},
    {.name = "pp2_tp2", .tp = 2, .budget = 40, .pp = 2},
    {.name = "pp2_fsdp2_tp2",
     .shard = 2,
     .tp = 2,
     .budget = 32,
     .pp = 2,
     .schedule = "InterleavedZeroBubble"},
    {.name = "hsdp2x2_pp2", .replicate = 2, .shard = 2, .budget = 32, .recompute = "full", .pp = 2},
};

INSTANTIATE_TEST_SUITE_P(Pipelines, LayoutTable,
                         ::testing::Combine(::testing::Values("llama3", "llama_tied", "qwen2", "qwen3",
                                                              "qwen3_tied"),
                                            ::testing::ValuesIn(kPipelineLayouts)),
                         name_of);

// As many stages as any schedule wants, of more layers.
std::vector<Layout> deep_pipelines() {
  std::vector<Layout> all;
  for (const char* schedule : {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                               "ZBVZeroBubble", "DualPipeV"}) {
    for (const int pp : {2, 3, 4}) {
      all.push_back({.name = fmt::format("pp{}_{}", pp, schedule),
                     .budget = 32,
                     .recompute = pp == 3 ? "selective" : "none",
                     .pp = pp,
                     .schedule = schedule});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(DeepPipelines, LayoutTable,
                         ::testing::Combine(::testing::Values("llama_tied_layers6", "qwen3_layers6"),
                                            ::testing::ValuesIn(deep_pipelines())),
                         name_of);

// Layers counted by hand, and several stages of one a rank.
const Layout kPipelinesByLayers[] = {
    {.name = "pp2_less1_less1", .budget = 32, .pp = 2, .first_less = 1, .last_less = 1},
    {.name = "pp2_less0_less3", .budget = 32, .pp = 2, .schedule = "GPipe", .first_less = 0, .last_less = 3},
    {.name = "pp3_less2_less1", .budget = 32, .recompute = "full", .pp = 3, .first_less = 2, .last_less = 1},
    {.name = "pp4_less0_less0", .budget = 32, .pp = 4, .first_less = 0, .last_less = 0},
    {.name = "pp2_zbv_less1_less1",
     .shard = 2,
     .budget = 32,
     .pp = 2,
     .schedule = "ZBVZeroBubble",
     .first_less = 1,
     .last_less = 1},
    {.name = "pp2_six_stages", .budget = 32, .pp = 2, .schedule = "Interleaved1F1B", .layers_per_stage = 1},
    {.name = "pp2_six_stages_zero_bubble",
     .budget = 32,
     .pp = 2,
     .schedule = "InterleavedZeroBubble",
     .layers_per_stage = 1},
    {.name = "pp2_eight_stages_bfs",
     .budget = 32,
     .pp = 2,
     .schedule = "LoopedBFS",
     .first_less = 1,
     .last_less = 1,
     .layers_per_stage = 1},
};

INSTANTIATE_TEST_SUITE_P(PipelinesByLayers, LayoutTable,
                         ::testing::Combine(::testing::Values("llama3_layers6", "qwen3_tied_layers6"),
                                            ::testing::ValuesIn(kPipelinesByLayers)),
                         name_of);

// One to eight micro-batches, no two as long as each other.
std::vector<Layout> one_to_eight() {
  std::vector<Layout> all;
  for (const char* schedule : {"GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                               "ZBVZeroBubble", "DualPipeV"}) {
    Lengths documents;
    for (int64_t count = 1; count <= 8; ++count) {
      documents.push_back(9 + count);
      all.push_back({.name = fmt::format("pp2_{}_{}", schedule, count),
                     .budget = 17,  // of one document
                     .pp = 2,
                     .schedule = schedule,
                     .documents = documents});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(MicroBatches, LayoutTable,
                         ::testing::Combine(::testing::Values("qwen3_tied"),
                                            ::testing::ValuesIn(one_to_eight())),
                         name_of);

const Layout kReduceEach[] = {
    {.name = "fsdp2", .shard = 2, .budget = 32, .reduce_each = true},
    {.name = "pp2", .budget = 32, .pp = 2, .reduce_each = true},
    {.name = "pp2_fsdp2", .shard = 2, .budget = 32, .pp = 2, .reduce_each = true},
    {.name = "pp2_fsdp2_zbv",
     .shard = 2,
     .budget = 32,
     .reshard = "always",
     .pp = 2,
     .schedule = "ZBVZeroBubble",
     .reduce_each = true},
    {.name = "hsdp2x2_pp2",
     .replicate = 2,
     .shard = 2,
     .budget = 32,
     .pp = 2,
     .schedule = "DualPipeV",
     .reduce_each = true},
};

INSTANTIATE_TEST_SUITE_P(ReduceEach, LayoutTable,
                         ::testing::Combine(::testing::Values("llama3", "llama_tied"),
                                            ::testing::ValuesIn(kReduceEach)),
                         name_of);

const Layout kValueLayouts[] = {
    {.name = "fsdp2_tp2", .shard = 2, .tp = 2, .budget = 32},
    {.name = "pp2", .budget = 32, .pp = 2},
    {.name = "pp3_bfs", .budget = 32, .pp = 3, .schedule = "LoopedBFS"},
    {.name = "pp2_fsdp2_zbv", .shard = 2, .budget = 32, .pp = 2, .schedule = "ZBVZeroBubble"},
    {.name = "pp2_tp2", .tp = 2, .budget = 40, .recompute = "full", .pp = 2},
};

INSTANTIATE_TEST_SUITE_P(Values, LayoutTable,
                         ::testing::Combine(::testing::Values("llama3_layers6_value",
                                                              "qwen3_tied_layers6_value"),
                                            ::testing::ValuesIn(kValueLayouts)),
                         name_of);

// A07: rows that do not divide are no rows of the model.
const Layout kVocabularyLayouts[] = {
    {.name = "fsdp3", .shard = 3, .budget = 40},
    {.name = "tp4", .tp = 4, .budget = 40},
    {.name = "fsdp2_tp4", .shard = 2, .tp = 4, .recompute = "full"},
};

INSTANTIATE_TEST_SUITE_P(Vocabulary, LayoutTable,
                         ::testing::Combine(::testing::Values("llama3_vocab101", "llama_tied_vocab101"),
                                            ::testing::ValuesIn(kVocabularyLayouts)),
                         name_of);

// C02: long documents and short ones, or fewer than ranks: all take part in as many micro-batches.
const Lengths kLongAndShort = {8, 8, 8, 8, 8, 8, 8, 8, 1, 1, 1, 1, 1, 1, 1, 1};
const Layout kUnevenLayouts[] = {
    {.name = "fsdp2_long_and_short", .shard = 2, .budget = 16, .documents = kLongAndShort},
    {.name = "ddp3_long_and_short", .replicate = 3, .budget = 16, .documents = kLongAndShort},
    {.name = "fsdp3_one_document", .shard = 3, .budget = 32, .reshard = "always", .documents = {17}},
    {.name = "fsdp2_tp2_one_document", .shard = 2, .tp = 2, .budget = 32, .documents = {17}},
    {.name = "fsdp2_pp2_long_and_short", .shard = 2, .budget = 16, .pp = 2, .documents = kLongAndShort},
    {.name = "ddp3_pp2_long_and_short",
     .replicate = 3,
     .budget = 16,
     .pp = 2,
     .schedule = "DualPipeV",
     .documents = kLongAndShort},
    {.name = "fsdp2_pp2_one_document",
     .shard = 2,
     .budget = 32,
     .pp = 2,
     .schedule = "InterleavedZeroBubble",
     .documents = {17}},
};

INSTANTIATE_TEST_SUITE_P(Uneven, LayoutTable,
                         ::testing::Combine(::testing::Values("qwen3"), ::testing::ValuesIn(kUnevenLayouts)),
                         name_of);

// Weights that are cast anew for every step are the same weights.
TEST(Layouts, OffloadChangesNoBit) {
  for (Layout layout :
       {Layout{.name = "one rank"}, Layout{.name = "fsdp2", .shard = 2, .budget = 32},
        Layout{.name = "fsdp2_tp2_never", .shard = 2, .tp = 2, .reshard = "never"},
        Layout{.name = "ddp2_recompute", .replicate = 2, .recompute = "full"},
        Layout{.name = "pp2", .budget = 32, .pp = 2},
        Layout{.name = "fsdp2_pp2_zbv", .shard = 2, .budget = 32, .pp = 2, .schedule = "ZBVZeroBubble"}}) {
    SCOPED_TRACE(layout.name);
    const Outcome want = run_layout("qwen3_tied", layout, "float32", "bfloat16");
    layout.offload = true;
    testing::expect_bitwise(run_layout("qwen3_tied", layout, "float32", "bfloat16"), want);
  }
}

// PyTorch's own order, from its CSV, runs as the schedule of that name.
TEST(Layouts, PyTorchsOrdersRunAsTheNamedOnes) {
  for (const char* schedule :
       {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}) {
    for (const int pp : {2, 4}) {
      Layout layout{.name = schedule, .budget = 16, .pp = pp, .schedule = schedule};
      for (int64_t i = 0; i < 8; ++i) layout.documents.push_back(9 + i % 7);  // each in its own micro-batch
      SCOPED_TRACE(fmt::format("{} on {} ranks", schedule, pp));
      const Outcome want = run_layout("llama_tied_layers6", layout, "float32");
      layout.schedule = "1F1B";  // has no say
      layout.csv = fmt::format("{}_{}x2_8.csv", schedule, pp);
      testing::expect_bitwise(run_layout("llama_tied_layers6", layout, "float32"), want);
    }
  }
}

// D13: a seed gives no two layers the same weights, on whichever stages they are.
TEST(Layouts, StagesDoNotStartAlike) {
  const Outcome got =
      run_layout("qwen3_layers6", {.name = "pp3", .budget = 32, .pp = 3, .documents = {17}}, "float64");
  const auto& weights = got.weights.at(0);
  for (int a = 0; a < 6; ++a) {
    for (int b = 0; b < a; ++b) {
      const auto of = [&](int layer) {
        return weights.at(fmt::format("model.layers.{}.self_attn.q_proj.weight", layer));
      };
      EXPECT_GT((of(a) - of(b)).abs().mean().item<double>(), 0.01) << a << " " << b;
    }
  }
}

// C04 and S5: the budget is that of a rank, whatever the layout, and all ranks get the error.
TEST(Layouts, ADocumentLongerThanTheBudgetIsRefusedOnAllRanks) {
  for (const Layout& layout : {Layout{.name = "fsdp2", .shard = 2}, Layout{.name = "tp2", .tp = 2},
                               Layout{.name = "pp2", .pp = 2}}) {
    Layout tight = layout;
    tight.budget = 32;
    tight.documents = {8, 33, 3};
    try {
      run_layout("qwen3", tight, "float32");
      ADD_FAILURE() << layout.name;
    } catch (const BadData& error) {
      const std::string text = error.what();
      for (const char* part : {"33", "32", "training.max_tokens_per_microbatch"})
        EXPECT_NE(text.find(part), text.npos) << text;
    }
  }
}

}  // namespace
}  // namespace titanium
