#include "titanium/config/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "titanium/base/error.h"
#include "titanium/config/hf_config.h"

namespace titanium {
namespace {

// transformers' values for the same config.json, in both spellings.
TEST(Rope, EqualsTransformers) {
  const Json file = read_json(std::string(TITANIUM_SOURCE_DIR) + "/tests/data/config/rope.json");
  ASSERT_GE(file["cases"].size(), 30u);
  for (const Json& entry : file["cases"]) {
    const std::string name = entry["name"];
    SCOPED_TRACE(name);
    const HfConfig config = HfConfig::from_json(entry["config"], name);
    const RopeTable table = rope_table(config.rope, config.head_dim);
    EXPECT_NEAR(table.attention_factor, entry["attention_factor"].get<double>(), 1e-12);
    ASSERT_EQ(table.inv_freq.size(), entry["inv_freq"].size());
    for (size_t i = 0; i < table.inv_freq.size(); ++i) {
      const double expected = entry["inv_freq"][i].get<double>();
      EXPECT_NEAR(table.inv_freq[i], expected, 1e-6 * std::abs(expected)) << i;
    }
  }
}

TEST(Rope, ScalingChangesTheTable) {
  Rope rope;
  rope.theta = 500000;
  const std::vector<double> plain = rope_table(rope, 64).inv_freq;
  EXPECT_DOUBLE_EQ(plain[0], 1);
  EXPECT_NEAR(plain[31], std::pow(500000.0, -62.0 / 64), 1e-20);

  rope.type = RopeType::kLlama3;
  rope.factor = 8;
  rope.original_max_position_embeddings = 8192;
  const std::vector<double> scaled = rope_table(rope, 64).inv_freq;
  EXPECT_EQ(scaled[0], plain[0]);        // a short wave stays
  EXPECT_EQ(scaled[31], plain[31] / 8);  // a long one is stretched
  int between = 0;
  for (size_t i = 0; i < 32; ++i) between += scaled[i] < plain[i] && scaled[i] > plain[i] / 8;
  EXPECT_GT(between, 0);
}

TEST(Rope, OddHeadDimIsABug) {
  EXPECT_THROW(rope_table(Rope{}, 7), Bug);
  EXPECT_THROW(rope_table(Rope{}, 0), Bug);
}

}  // namespace
}  // namespace titanium
