#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/models/kv_cache.h"
#include "titanium/models/model.h"

namespace titanium {
namespace {

HfConfig fixture(const std::string& arch) {
  return HfConfig::from_folder(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/models/" + arch);
}

const std::vector<int64_t>& shape(const Model& model, const std::string& name) {
  const Weight* weight = model.table->find(name);
  if (!weight) throw Bug("no weight {}", name);
  return weight->shape();
}

using Shape = std::vector<int64_t>;

TEST(DenseDecoder, ShapesAreReadNotDerived) {
  // hidden 64, 4 heads, 2 key heads of width 24: head_dim is not hidden / heads, and o_proj has a bias.
  const Model model = model_registry(fixture("llama_headdim")).build(fixture("llama_headdim"));
  EXPECT_EQ(shape(model, "model.layers.0.self_attn.q_proj.weight"), (Shape{96, 64}));
  EXPECT_EQ(shape(model, "model.layers.0.self_attn.k_proj.weight"), (Shape{48, 64}));
  EXPECT_EQ(shape(model, "model.layers.0.self_attn.o_proj.weight"), (Shape{64, 96}));
  EXPECT_EQ(shape(model, "model.layers.1.self_attn.o_proj.bias"), (Shape{64}));
  EXPECT_EQ(model.block_count(), 4);
}

TEST(DenseDecoder, FamiliesDifferByFlags) {
  const Model qwen2 = dense_decoder(fixture("qwen2")), qwen3 = dense_decoder(fixture("qwen3"));
  EXPECT_NE(qwen2.table->find("model.layers.0.self_attn.q_proj.bias"), nullptr);
  EXPECT_EQ(qwen2.table->find("model.layers.0.self_attn.o_proj.bias"), nullptr);
  EXPECT_EQ(qwen2.table->find("model.layers.0.self_attn.q_norm.weight"), nullptr);
  EXPECT_EQ(qwen3.table->find("model.layers.0.self_attn.q_proj.bias"), nullptr);
  EXPECT_EQ(shape(qwen3, "model.layers.0.self_attn.q_norm.weight"), (Shape{16}));
}

TEST(DenseDecoder, ATiedHeadIsNotDeclaredTwice) {
  const Model tied = dense_decoder(fixture("qwen3_tied")), untied = dense_decoder(fixture("qwen3"));
  EXPECT_EQ(tied.table->find("lm_head.weight"), nullptr);
  EXPECT_TRUE(tied.table->find("model.embed_tokens.weight")->shared());
  EXPECT_NE(untied.table->find("lm_head.weight"), nullptr);
}

// A11: the table of angles is formed by formula in fp32, whatever the dtype of the computation.
TEST(BlockInput, AnglesStayFp32UnderBf16Compute) {
  const Model model = dense_decoder(fixture("llama3"));
  PackedBatch batch;
  batch.tokens = {1, 2, 3};
  batch.positions = {0, 777, 8191};
  batch.labels = {2, 3, kNoLabel};
  batch.weight = {0.5, 0.5, 0};
  batch.bounds = {0, 3};
  const BlockInput in = block_input(model, batch, at::kBFloat16, HeadRows::kAll);
  ASSERT_EQ(in.angles.cos.scalar_type(), at::kFloat);
  ASSERT_EQ(in.angles.sin.scalar_type(), at::kFloat);
  for (int64_t t = 0; t < 3; ++t) {
    for (size_t i = 0; i < model.rope.inv_freq.size(); ++i) {
      const double angle =
          static_cast<double>(batch.positions[static_cast<size_t>(t)]) * model.rope.inv_freq[i];
      const auto column = static_cast<int64_t>(i);
      EXPECT_NEAR(in.angles.cos[t][column].item<double>(), model.rope.attention_factor * std::cos(angle),
                  1e-6);
      EXPECT_NEAR(in.angles.sin[t][column].item<double>(), model.rope.attention_factor * std::sin(angle),
                  1e-6);
    }
  }
}

// G01: of a pack that is mostly prompt only the rows with a loss are named to the head.
TEST(BlockInput, OnlyRowsWithALossGoThroughTheHead) {
  const Model model = dense_decoder(fixture("llama3"));
  PackedBatch batch;
  for (int64_t t = 0; t < 400; ++t) {
    batch.tokens.push_back(t % 60);
    batch.positions.push_back(t);
    batch.labels.push_back(t == 399 ? kNoLabel : (t + 1) % 60);
    batch.weight.push_back(t >= 379 && t < 399 ? 0.05 : 0);  // 5 %
  }
  batch.bounds = {0, 400};
  const auto rows = [&](HeadRows which) { return block_input(model, batch, at::kFloat, which).rows; };
  EXPECT_TRUE(at::equal(rows(HeadRows::kWeighted), at::arange(379, 399, at::kLong)));
  EXPECT_TRUE(at::equal(rows(HeadRows::kLabelled), at::arange(0, 399, at::kLong)));
  EXPECT_FALSE(rows(HeadRows::kAll).defined());
}

TEST(Model, FlopsOfAForwardAreCountedByHand) {
  HfConfig c = fixture("llama3");  // D 64, F 112, N 4, K 2, H 16, V 320, 2 layers
  const Model model = dense_decoder(c);
  const double matrices = 2.0 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 112) * 2 + 2.0 * 64 * 320;
  const double attention = 2 * (4.0 * 4 * 16) * (10 * 11 / 2);
  EXPECT_DOUBLE_EQ(model.forward_flops(10), 10 * matrices + attention);
}

TEST(Model, BlocksCostWhatTheModelDoes) {
  const Model model = dense_decoder(fixture("llama3"));
  const auto flops = [&](int64_t T, int64_t L) {
    double sum = 0;
    for (const auto& block : model.blocks) {
      const Block::Cost cost = block->cost(T, L, 2);
      sum += cost.matmul + cost.attention + cost.head;
      EXPECT_EQ(cost.tp_bytes + cost.tp_again_bytes, 0);
    }
    return sum;
  };
  EXPECT_DOUBLE_EQ(flops(10, 10), model.forward_flops(10));
  EXPECT_DOUBLE_EQ(flops(30, 10), 3 * model.forward_flops(10));
}

TEST(Registry, UnknownFamilyIsRefusedWithTheKnownOnes) {
  HfConfig c = fixture("llama3");
  c.model_type = "gpt2";
  try {
    model_registry(c);
    FAIL();
  } catch (const BadConfig& e) {
    EXPECT_NE(std::string(e.what()).find("'gpt2'"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("qwen3"), std::string::npos);
  }
}

TEST(KvCache, SlotsGrowOnTheirOwnAndNeverOverflow) {
  KvCache cache(1, 2, 3, 1, 2, at::kFloat);
  const at::Tensor a = at::ones({2, 1, 2}), b = at::full({1, 1, 2}, 2.0);
  cache.append(0, {1}, {0, 2}, a, a);
  cache.advance(1, 2);
  const KvCache::View view = cache.append(0, {1, 0}, {0, 1, 3}, at::cat({b, a}), at::cat({a, b}));
  EXPECT_EQ(view.bounds, (std::vector<int64_t>{0, 3, 5}));
  EXPECT_EQ(view.starts, (std::vector<int64_t>{3, 0}));
  EXPECT_TRUE(at::equal(view.k.narrow(0, 3, 3), at::cat({a, b})));
  EXPECT_TRUE(at::equal(view.v.narrow(0, 0, 2), at::cat({a, b}).narrow(0, 1, 2)));
  EXPECT_EQ(cache.length(0), 0);
  cache.advance(1, 1);
  EXPECT_THROW(cache.append(0, {1}, {0, 1}, b, b), Bug);
  EXPECT_THROW(cache.append(0, {0}, {0, 1}, a, a), Bug);
}

TEST(KvCache, OnlyWhatIsWrittenTakesMemory) {
  const auto resident = [] {  // bytes
    int64_t all = 0, pages = 0;
    std::ifstream("/proc/self/statm") >> all >> pages;
    return pages * ::sysconf(_SC_PAGESIZE);
  };
  const int64_t before = resident();
  KvCache cache(4, 64, 8192, 3, 64, at::kBFloat16);  // 64 slots of 3 MB in each of 8 tensors
  const at::Tensor row = at::ones({1, 3, 64}, at::kBFloat16);
  for (int64_t slot = 0; slot < 64; ++slot) {
    for (int64_t layer = 0; layer < 4; ++layer) cache.append(layer, {slot}, {0, 1}, row, row);
  }
  EXPECT_LT(resident() - before, int64_t{64} << 20);  // in huge pages 1 GiB
}

TEST(ValueHead, TakesThePlaceOfTheVocabulary) {
  const HfConfig c = fixture("qwen3_tied");
  const Model model = model_registry(c, ModelHead::kValue).build(c);
  EXPECT_EQ(model.head, nullptr);
  EXPECT_EQ(model.table->find("lm_head.weight"), nullptr);
  EXPECT_EQ(shape(model, "score.weight"), (Shape{1, c.hidden_size}));
  EXPECT_EQ(shape(model, "score.bias"), (Shape{1}));
  EXPECT_FALSE(model.table->find("model.embed_tokens.weight")->shared());  // used once
}

}  // namespace
}  // namespace titanium
