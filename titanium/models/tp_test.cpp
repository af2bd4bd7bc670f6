// The blocks of a model over tensor-parallel ranks against one rank, in fp64: what they give, gradients by
// their inputs and by every weight.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <mutex>

#include "titanium/base/error.h"
#include "titanium/dist/run_ranks.h"
#include "titanium/models/kv_cache.h"
#include "titanium/models/model.h"
#include "titanium/shard/param_store.h"

namespace titanium {
namespace {

constexpr double kTolerance = 1e-9;
constexpr int64_t kTokens = 24;

HfConfig fixture(const std::string& arch) {
  return HfConfig::from_folder(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/models/" + arch);
}

using Tensors = std::map<std::string, at::Tensor>;

// Everything that goes into a comparison, the same for every number of ranks.
struct Case {
  HfConfig config;
  ModelHead head = ModelHead::kLanguageModel;
  PackedBatch batch;
  HeadRows rows = HeadRows::kLabelled;
  bool keep_cheap = false, weighted = false;
  Tensors weights;                 // whole, by name
  std::vector<at::Tensor> inputs;  // [blocks], each [T, D]; that of the embedding is empty
  at::Tensor gradient, factors;    // [T, D] by a block's output, [4, T] by the head's statistics

  Case(const HfConfig& c, ModelHead kind) : config(c), head(kind) {
    at::manual_seed(7);
    const Model model = model_registry(c, kind).build(c);
    for (const auto& weight : model.table->weights())
      weights[weight->name()] = at::randn(weight->shape(), at::kDouble) * 0.3;
    const at::Tensor ids = at::randint(0, c.vocab_size, {kTokens}, at::kLong);
    batch.bounds = {0, 5, 17, kTokens};
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t document = t < 5 ? 0 : t < 17 ? 5 : 17;
      batch.tokens.push_back(ids[t].item<int64_t>());
      batch.positions.push_back(t - document);
      batch.labels.push_back(t == 4 || t == 16 || t == 23 || t % 5 == 1 ? kNoLabel
                                                                        : (t * 37 + 11) % c.vocab_size);
      batch.weight.push_back(batch.labels.back() < 0 ? 0 : 0.1);
      batch.temperature.push_back(0.7 + 0.02 * static_cast<double>(t));
    }
    inputs.assign(model.blocks.size(), at::Tensor());
    inputs[0] = at::empty({0}, at::kDouble);
    for (size_t b = 1; b < inputs.size(); ++b) inputs[b] = at::randn({kTokens, c.hidden_size}, at::kDouble);
    gradient = at::randn({kTokens, c.hidden_size}, at::kDouble);
    factors = at::randn({4, kTokens}, at::kDouble);
  }
};

// What a rank has seen; tensors between blocks are its rows.
struct Seen {
  std::vector<at::Tensor> outputs, input_gradients;  // [blocks]
  Tensors statistics;
  Tensors gradients;  // flat, whole weights; NaN where another rank owns the element
};

at::Tensor head_objective(const Case& c, const BlockOutput& out, Seen& seen) {
  if (out.loss.defined()) {
    seen.statistics = {{"loss", out.loss.detach()}, {"logprob", out.stats.logprob}};
    return out.loss;
  }
  at::Tensor sum = at::zeros({}, at::kDouble);
  int64_t row = 0;
  for (const auto& [name, value] : {std::pair{"logprob", &out.stats.logprob},
                                    {"entropy", &out.stats.entropy},
                                    {"squares", &out.stats.sum_pi_squared},
                                    {"value", &out.stats.value}}) {
    const at::Tensor factor = c.factors[row++];
    if (!value->defined()) continue;
    seen.statistics[name] = value->detach();
    sum = sum + (factor * *value).sum();
  }
  return sum;
}

Seen run(const Case& c, const Mesh& mesh) {
  const Tp tp(mesh.tp());
  Model model = model_registry(c.config, c.head).build(c.config, tp);
  StoreOptions options;
  options.dtypes = {at::kDouble, at::kDouble, at::kDouble};
  options.mesh = mesh;
  ParamStore store(*model.table, model.block_count(), options);
  for (const Slice& slice : store.slices()) {
    const at::Tensor own = slice.of(slice.unit->shard()),
                     whole = c.weights.at(slice.weight->name()).flatten();
    slice.each_run([&](const Slice::Run& run) {
      own.narrow(0, run.begin, run.count).copy_(whole.narrow(0, run.global, run.count));
    });
  }
  store.zero_grad();
  for (const auto& unit : store.units()) unit->unshard();

  BlockInput in = block_input(model, c.batch, at::kDouble, c.rows);
  in.keep_cheap = c.keep_cheap;
  in.wants = {true, true};
  if (c.weighted) in.nll_weight = c.factors[0].contiguous();
  Seen seen;
  for (int b = 0; b < model.block_count(); ++b) {
    const int64_t t = c.inputs[b].size(0) / tp.size();
    at::Tensor x = c.inputs[b].narrow(0, tp.rank() * t, t).clone().requires_grad_();
    BlockOutput out;
    const at::Tensor y = model.blocks[b]->forward(x, in, out);
    if (y.defined()) {
      const at::Tensor g = c.gradient.narrow(0, tp.rank() * y.size(0), y.size(0)).clone();
      seen.outputs.push_back(y.detach());
      seen.input_gradients.push_back(torch::autograd::grad({y}, {x}, {g}, std::nullopt, false, true)[0]);
      const at::NoGradGuard no_grad;
      BlockOutput ignored;
      EXPECT_LT((model.blocks[b]->forward(x, in, ignored) - y).abs().max().item<double>(), 1e-12);
    } else {
      seen.outputs.emplace_back();
      seen.input_gradients.push_back(torch::autograd::grad({head_objective(c, out, seen)}, {x})[0]);
    }
  }
  for (const auto& unit : store.units()) unit->reduce();
  for (const auto& weight : store.table().weights())
    seen.gradients[weight->name()] = at::full({weight->numel()}, std::nan(""), at::kDouble);
  for (const Slice& slice : store.slices()) {
    const at::Tensor own = slice.of(slice.unit->grad_shard());
    slice.each_run([&](const Slice::Run& run) {
      seen.gradients[slice.weight->name()]
          .narrow(0, run.global, run.count)
          .copy_(own.narrow(0, run.begin, run.count));
    });
  }
  return seen;
}

double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return INFINITY;
  const double d = a.numel() == 0 ? 0 : (a - b).abs().max().item<double>();
  return d == d ? d : INFINITY;
}

void expect_equal_over(const Case& c, int tp) {
  const Seen want = run(c, Mesh());
  std::vector<Seen> got(tp);
  run_ranks(tp, [&](std::shared_ptr<World> world) {
    const Mesh mesh({.dp_shard = 1, .tp = tp, .world_size = tp}, world);
    got[mesh.at().tp] = run(c, mesh);
  });
  const auto joined = [&](const auto& part_of) {
    std::vector<at::Tensor> parts;
    for (const Seen& seen : got) parts.push_back(part_of(seen));
    return at::cat(parts);
  };
  for (size_t b = 0; b < want.outputs.size(); ++b) {
    if (want.outputs[b].defined()) {
      EXPECT_LT(distance(joined([&](const Seen& s) { return s.outputs[b]; }), want.outputs[b]), kTolerance)
          << "block " << b;
    }
    if (b > 0) {
      EXPECT_LT(
          distance(joined([&](const Seen& s) { return s.input_gradients[b]; }), want.input_gradients[b]),
          kTolerance)
          << "gradient by the input of block " << b;
    }
  }
  for (const Seen& seen : got) {
    ASSERT_EQ(seen.statistics.size(), want.statistics.size());
    for (const auto& [name, value] : want.statistics) {
      EXPECT_LT(distance(seen.statistics.at(name), value), kTolerance) << name;
      EXPECT_TRUE(at::equal(seen.statistics.at(name), got[0].statistics.at(name))) << name;
    }
  }
  for (const auto& [name, value] : want.gradients) {
    at::Tensor sum = at::full_like(value, std::nan(""));
    for (const Seen& seen : got) {
      const at::Tensor& part = seen.gradients.at(name);
      ASSERT_FALSE((~sum.isnan() & ~part.isnan()).any().item<bool>()) << name << " is owned twice";
      sum = at::where(part.isnan(), sum, part);
    }
    EXPECT_LT(distance(sum, value), kTolerance) << "gradient of " << name;
  }
}

class TensorParallel : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(TensorParallel, BlocksEqualOneRank) {
  const auto& [arch, tp] = GetParam();
  Case c(fixture(arch), ModelHead::kLanguageModel);
  expect_equal_over(c, tp);
  c.keep_cheap = true;
  c.weighted = true;
  c.rows = HeadRows::kWeighted;
  expect_equal_over(c, tp);
}

TEST_P(TensorParallel, ValuesEqualOneRank) {
  const auto& [arch, tp] = GetParam();
  Case c(fixture(arch), ModelHead::kValue);
  expect_equal_over(c, tp);
  c.rows = HeadRows::kAll;
  expect_equal_over(c, tp);
}

INSTANTIATE_TEST_SUITE_P(Models, TensorParallel,
                         testing::Combine(testing::Values("llama3", "llama_tied", "llama_headdim", "qwen2",
                                                          "qwen3", "qwen3_tied", "mistral_swa"),
                                          testing::Values(2, 3, 4)),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param));
                         });

TEST(TensorParallel, AVocabularyAndAWidthThatDoNotDivide) {
  for (const char* arch : {"llama3", "llama_tied"}) {
    HfConfig c = fixture(arch);
    c.vocab_size = 101;
    c.intermediate_size = 37;
    expect_equal_over(Case(c, ModelHead::kLanguageModel), 4);
  }
}

// SmolLM2's heads over 2 ranks (q 6+3, kv 2+1), and over 5, which share key heads.
TEST(TensorParallel, HeadsThatDoNotDivide) {
  HfConfig c = fixture("qwen2");  // with biases
  c.num_attention_heads = 9;
  c.num_key_value_heads = 3;
  for (const int tp : {2, 4, 6}) expect_equal_over(Case(c, ModelHead::kLanguageModel), tp);
}

TEST(TensorParallel, MlpBiasIsAddedOnce) {
  HfConfig c = fixture("llama_headdim");
  c.mlp_bias = true;
  expect_equal_over(Case(c, ModelHead::kLanguageModel), 3);
}

TEST(TensorParallel, MoreRanksThanHeadsAreRefusedByName) {
  try {
    dense_decoder(fixture("llama3"), ModelHead::kLanguageModel, Tp(0, 5));
    FAIL();
  } catch (const BadConfig& e) {
    EXPECT_NE(std::string(e.what()).find("num_attention_heads"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("parallelism.tensor_parallel_degree"), std::string::npos)
        << e.what();
  }
}

TEST(TensorParallel, ABatchThatIsNotPaddedIsABug) {
  Case c(fixture("llama3"), ModelHead::kLanguageModel);
  c.batch.tokens.pop_back();
  c.batch.positions.pop_back();
  c.batch.labels.pop_back();
  c.batch.bounds.back() -= 1;
  EXPECT_THROW(run_ranks(2,
                         [&](std::shared_ptr<World> world) {
                           run(c, Mesh({.dp_shard = 1, .tp = 2, .world_size = 2}, world));
                         }),
               Bug);
}

TEST(TensorParallel, GeneratingTextIsRefused) {
  const HfConfig c = fixture("llama3");
  const Model model = dense_decoder(c, ModelHead::kLanguageModel, Tp(0, 2));
  KvCache cache(c.num_hidden_layers, 1, 8, c.num_key_value_heads, c.head_dim, at::kFloat);
  BlockInput in;
  in.cache = &cache;
  BlockOutput out;
  EXPECT_THROW(model.blocks[0]->forward(at::empty({0}), in, out), BadConfig);
}

// A place on the axis is enough to declare and to count; not to run.
TEST(TensorParallel, ATableOfAnyRankNeedsNoGroup) {
  const HfConfig c = fixture("llama3");
  int64_t queries = 0, stream = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const Model model = dense_decoder(c, ModelHead::kLanguageModel, Tp(rank, 4));
    queries += model.table->find("model.layers.0.self_attn.q_proj.weight")->local_shape()[0];
    EXPECT_EQ(model.table->find("model.layers.0.self_attn.o_proj.weight")->local_shape(),
              (std::vector<int64_t>{64, 16}));
    stream += model.blocks[1]->bytes(64, 2, false).saved;
    BlockOutput out;
    EXPECT_THROW(model.blocks[2]->forward(at::zeros({1, 64}), {}, out), Bug);
  }
  EXPECT_EQ(queries, 64);
  const Model whole = dense_decoder(c);
  // Key heads are held twice.
  EXPECT_EQ(stream, whole.blocks[1]->bytes(64, 2, false).saved + 2 * 64 * 32 * 2);
}

}  // namespace
}  // namespace titanium
