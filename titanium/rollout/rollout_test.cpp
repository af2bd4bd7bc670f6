#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "titanium/base/error.h"
#include "titanium/rollout/sampling.h"

namespace titanium {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f};

int64_t choose(const SamplingOptions& options, double uniform) {
  return choose_token(kLogits.data(), static_cast<int64_t>(kLogits.size()), options, uniform);
}

TEST(Sampling, GreedyTakesTheLowestOfEquals) {
  EXPECT_EQ(choose({}, 0.9), 1);
}

TEST(Sampling, FrequenciesAreTheSoftmax) {
  SamplingOptions options;
  options.temperature = 0.7;
  const int n = 20000;
  std::array<int, 5> seen{};
  for (int i = 0; i < n; ++i) ++seen[choose(options, (i + 0.5) / n)];
  double total = 0;
  for (float l : kLogits) total += std::exp(l / 0.7);
  for (size_t v = 0; v < kLogits.size(); ++v) {
    EXPECT_NEAR(seen[v] / static_cast<double>(n), std::exp(kLogits[v] / 0.7) / total, 1e-3) << v;
  }
}

TEST(Sampling, TopKAndTopPCutTheTail) {
  SamplingOptions options;
  options.temperature = 1;
  options.top_k = 3;
  std::array<bool, 5> seen{};
  for (int i = 0; i < 1000; ++i) seen[choose(options, i / 1000.0)] = true;
  EXPECT_EQ(seen, (std::array<bool, 5>{false, true, true, true, false}));
  options.top_k = 0;
  options.top_p = 0.5;  // the two largest hold 0.41 each
  seen = {};
  for (int i = 0; i < 1000; ++i) seen[choose(options, i / 1000.0)] = true;
  EXPECT_EQ(seen, (std::array<bool, 5>{false, true, false, true, false}));
  options.top_p = 1e-9;
  EXPECT_EQ(choose(options, 0.999), 1);
}

TEST(Sampling, BadOptionsAndLogitsAreRefusedByName) {
  for (auto [field, text] :
       {std::pair{&SamplingOptions::temperature, "temperature"}, {&SamplingOptions::top_p, "top_p"}}) {
    SamplingOptions options;
    options.*field = -1;
    try {
      options.check();
      FAIL() << text;
    } catch (const BadConfig& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos);
    }
  }
  const std::vector<float> bad = {0, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_THROW(choose_token(bad.data(), 2, {}, 0), BadData);
}

}  // namespace
}  // namespace titanium
