#include "titanium/config/name_pattern.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"

namespace titanium {
namespace {

TEST(NamePattern, MatchesWholeNames) {
  EXPECT_TRUE(matches_pattern("model.norm.weight", "model.norm.weight"));
  EXPECT_FALSE(matches_pattern("model.norm", "model.norm.weight"));
  EXPECT_TRUE(matches_pattern("model.layers.*.q_proj.*", "model.layers.11.self_attn.q_proj.weight"));
  EXPECT_TRUE(matches_pattern("*norm*", "model.layers.0.input_layernorm.weight"));
  EXPECT_TRUE(matches_pattern("model.layers.?.mlp.*", "model.layers.3.mlp.up_proj.weight"));
  EXPECT_FALSE(matches_pattern("model.layers.?.mlp.*", "model.layers.13.mlp.up_proj.weight"));
  EXPECT_TRUE(matches_pattern("*", ""));
  EXPECT_FALSE(matches_pattern("", "a"));
  EXPECT_TRUE(matches_pattern("*a*b", "aabab"));
  EXPECT_FALSE(matches_pattern("*a*b", "aaba"));
}

TEST(NamePattern, APatternThatFitsNothingIsNamed) {
  const std::vector<std::string> names = {"model.norm.weight", "lm_head.weight"};
  check_patterns(std::vector<std::string>{"lm_*", "*"}, names, "model.freeze");
  try {
    check_patterns(std::vector<std::string>{"lm_hea.weight"}, names, "model.freeze");
    FAIL();
  } catch (const BadConfig& e) {
    EXPECT_STREQ(
        e.what(),
        "model.freeze = 'lm_hea.weight' fits no weight of the model; did you mean 'lm_head.weight'?");
  }
}

}  // namespace
}  // namespace titanium
