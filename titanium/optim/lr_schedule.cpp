#include "titanium/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "titanium/base/error.h"

namespace titanium {
namespace {

void check(const LrScheduleOptions& o) {
  if (o.total_steps < 1)
    throw BadConfig("[lr_scheduler] total_steps = {}: allowed: a number >= 1", o.total_steps);
  if (o.warmup_steps < 0) {
    throw BadConfig("[lr_scheduler] warmup_steps = {}: allowed: a number >= 0", o.warmup_steps);
  }
  if (!(o.decay_ratio <= 1)) {
    throw BadConfig("[lr_scheduler] decay_ratio = {}: allowed: a number in [0, 1], or below 0 for all",
                    o.decay_ratio);
  }
  if (!(o.stable_ratio >= 0 && o.stable_ratio <= 1)) {
    throw BadConfig("[lr_scheduler] stable_ratio = {}: allowed: a number in [0, 1]", o.stable_ratio);
  }
  if (!(o.min_lr_factor >= 0 && o.min_lr_factor <= 1)) {
    throw BadConfig("[lr_scheduler] min_lr_factor = {}: allowed: a number in [0, 1]", o.min_lr_factor);
  }
  if (!(std::isfinite(o.cycles) && o.cycles >= 0)) {
    throw BadConfig("[lr_scheduler] cycles = {}: allowed: a number >= 0", o.cycles);
  }
}

double cosine(double x) {
  return 0.5 * (1 + std::cos(std::numbers::pi * x));
}

double shape(LrDecay decay, double x) {
  switch (decay) {
    case LrDecay::kConstant:
      return 1;
    case LrDecay::kLinear:
      return 1 - x;
    case LrDecay::kSqrt:
      return 1 - std::sqrt(x);
    case LrDecay::kCosine:
    case LrDecay::kWsd:
      return cosine(x);
  }
  return 1;
}

int64_t stable_steps(const LrScheduleOptions& o, int64_t after_warmup) {
  return static_cast<int64_t>(static_cast<double>(after_warmup) * o.stable_ratio);
}

}  // namespace

LrDecay parse_lr_decay(const std::string& name) {
  if (name == "constant") return LrDecay::kConstant;
  if (name == "linear") return LrDecay::kLinear;
  if (name == "sqrt") return LrDecay::kSqrt;
  if (name == "cosine") return LrDecay::kCosine;
  if (name == "wsd") return LrDecay::kWsd;
  throw BadConfig("[lr_scheduler] decay_type = '{}': allowed: constant, linear, sqrt, cosine, wsd", name);
}

LrFactor torchtitan_schedule(const LrScheduleOptions& o) {
  check(o);
  const int64_t n = o.total_steps;
  const int64_t w = std::min(o.warmup_steps, n);
  int64_t decay = n - w;
  if (o.decay == LrDecay::kConstant) {
    decay = 0;
  } else if (o.decay == LrDecay::kWsd) {
    decay = n - w - stable_steps(o, n - w);
  } else if (o.decay_ratio >= 0) {  // nearbyint: ties to even, as Python's round
    decay = std::min(n - w, static_cast<int64_t>(std::nearbyint(static_cast<double>(n) * o.decay_ratio)));
  }
  const int64_t stable = n + 1 - w - decay;
  return [=, kind = o.decay, min = o.min_lr_factor](int64_t i) {
    if (i < w) return static_cast<double>(i + 1) / static_cast<double>(w);
    if (i < w + stable || decay == 0) return 1.0;
    const double x = std::min(1.0, static_cast<double>(i + 1 - w - stable) / static_cast<double>(decay));
    return min + (1 - min) * shape(kind, x);
  };
}

LrFactor verl_schedule(const LrScheduleOptions& o, bool zero_indexed) {
  check(o);
  const int64_t n = o.total_steps, w = o.warmup_steps;
  const double min = o.min_lr_factor;
  const auto warm = [w](int64_t i) {
    return static_cast<double>(i) / static_cast<double>(std::max<int64_t>(1, w));
  };
  const int64_t shift = zero_indexed ? 0 : 1;
  switch (o.decay) {
    case LrDecay::kConstant:
      return [=](int64_t i) { return i + shift < w ? warm(i + shift) : 1.0; };
    case LrDecay::kCosine:
      return [=, cycles = o.cycles](int64_t step) {
        const int64_t i = step + shift;
        if (i < w) return warm(i);
        const double x = static_cast<double>(i - w) / static_cast<double>(std::max<int64_t>(1, n - w));
        return std::max(min, (1 + min) / 2 + (1 - min) / 2 * std::cos(2 * std::numbers::pi * cycles * x));
      };
    case LrDecay::kWsd: {
      const int64_t after = std::max<int64_t>(0, n - w);
      const int64_t stable = stable_steps(o, after);
      return [=](int64_t step) {
        const int64_t i = step + shift;
        if (i < w) return warm(i);
        if (i < w + stable) return 1.0;
        if (i >= n) return min;
        const double x =
            static_cast<double>(i - w - stable) / static_cast<double>(std::max<int64_t>(1, after - stable));
        return min + (1 - min) * std::max(0.0, cosine(x));
      };
    }
    default:
      throw BadConfig("verl has no {} schedule: allowed: constant, cosine, wsd",
                      o.decay == LrDecay::kLinear ? "linear" : "sqrt");
  }
}

}  // namespace titanium
