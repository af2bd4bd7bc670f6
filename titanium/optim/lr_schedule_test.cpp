#include "titanium/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

// "torchtitan_cosine_w10_decay0.3_min0.1", "verl_wsd_w0_min0.0_stable0.5", ... -> the schedule of that name.
LrFactor schedule_of(const std::string& name, int64_t steps) {
  const auto value = [&](const std::string& key, double absent) {
    const size_t at = name.find("_" + key);
    return at == name.npos ? absent : std::stod(name.substr(at + 1 + key.size()));
  };
  LrScheduleOptions o;
  o.total_steps = steps;
  o.warmup_steps = static_cast<int64_t>(value("w1", -1) < 0 ? 0 : 10);
  o.min_lr_factor = value("min", 0);
  o.stable_ratio = value("stable", 0.9);
  if (name.find("decayNone") == name.npos) o.decay_ratio = value("decay", -1);
  const size_t first = name.find('_');
  o.decay = parse_lr_decay(name.substr(first + 1, name.find('_', first + 1) - first - 1));
  if (name.starts_with("torchtitan")) return torchtitan_schedule(o);
  return verl_schedule(o, !name.ends_with("zero0"));
}

TEST(LrSchedule, EveryCurveOfTheAncestors) {
  const Json data = read_json(TITANIUM_SOURCE_DIR "/tests/data/optim/lr_schedules.json");
  const double base = data.at("base_lr").get<double>();
  const auto steps = data.at("steps").get<int64_t>();
  int curves = 0;
  for (const auto& [name, curve] : data.at("schedules").items()) {
    const LrFactor factor = schedule_of(name, steps);
    ASSERT_EQ(curve.size(), static_cast<size_t>(steps));
    for (int64_t i = 0; i < steps; ++i) {
      ASSERT_NEAR(base * factor(i), curve[i].get<double>(), 1e-12 * base) << name << " step " << i;
    }
    ++curves;
  }
  EXPECT_EQ(curves, 44);
}

TEST(LrSchedule, ConstantAndWsdByTorchtitansWarmUp) {
  const LrFactor constant =
      torchtitan_schedule({.total_steps = 10, .warmup_steps = 4, .decay = LrDecay::kConstant});
  EXPECT_EQ(constant(0), 0.25);
  EXPECT_EQ(constant(3), 1);
  EXPECT_EQ(constant(9), 1);
  EXPECT_EQ(constant(1000), 1);
  // 20 updates after the warm-up, the first floor(20 x 0.75) and the virtual one at 1; the cosine over 5.
  const LrFactor wsd = torchtitan_schedule({.total_steps = 24,
                                            .warmup_steps = 4,
                                            .decay = LrDecay::kWsd,
                                            .stable_ratio = 0.75,
                                            .min_lr_factor = 0.2});
  EXPECT_EQ(wsd(4), 1);
  EXPECT_EQ(wsd(19), 1);
  EXPECT_NEAR(wsd(20), 0.2 + 0.8 * 0.5 * (1 + std::cos(M_PI * 0.2)), 1e-15);
  EXPECT_GT(wsd(23), 0.2);  // the virtual update 24 is the one at the minimum
  EXPECT_NEAR(wsd(24), 0.2, 1e-15);
  EXPECT_NEAR(wsd(99), 0.2, 1e-15);
}

TEST(LrSchedule, OddLengths) {
  const LrFactor all_warm_up = torchtitan_schedule({.total_steps = 3, .warmup_steps = 50});
  EXPECT_EQ(all_warm_up(2), 1);
  const LrFactor one = torchtitan_schedule({.total_steps = 1});
  EXPECT_EQ(one(0), 1);
  for (int64_t i = 0; i < 40; ++i) {  // never above 1, never rises again after the end
    const LrFactor f = torchtitan_schedule({.total_steps = 21, .warmup_steps = 2, .decay = LrDecay::kCosine});
    EXPECT_LE(f(i), 1);
    if (i > 2) {
      EXPECT_LE(f(i), f(i - 1));
    }
  }
}

TEST(LrSchedule, RefusesNumbersOutOfRange) {
  EXPECT_THROW(torchtitan_schedule({.total_steps = 0}), BadConfig);
  EXPECT_THROW(torchtitan_schedule({.total_steps = 5, .warmup_steps = -1}), BadConfig);
  EXPECT_THROW(torchtitan_schedule({.total_steps = 5, .decay_ratio = 1.5}), BadConfig);
  EXPECT_THROW(torchtitan_schedule({.total_steps = 5, .min_lr_factor = -0.1}), BadConfig);
  EXPECT_THROW(verl_schedule({.total_steps = 5, .decay = LrDecay::kWsd, .stable_ratio = 2}), BadConfig);
  EXPECT_THROW(verl_schedule({.total_steps = 5, .decay = LrDecay::kSqrt}), BadConfig);
  EXPECT_THROW(parse_lr_decay("exponential"), BadConfig);
}

TEST(LRSchedulersContainer, ThePositionIsTheState) {
  LRSchedulersContainer lr(torchtitan_schedule({.total_steps = 10, .warmup_steps = 5}), 0.1);
  EXPECT_DOUBLE_EQ(lr.lr(), 0.02);
  lr.step();
  EXPECT_DOUBLE_EQ(lr.lr(), 0.04);
  LRSchedulersContainer other(torchtitan_schedule({.total_steps = 10, .warmup_steps = 5}), 0.1);
  other.set_position(lr.position());
  EXPECT_EQ(other.lr(), lr.lr());
}

}  // namespace
}  // namespace titanium
