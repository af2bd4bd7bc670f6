// Learning-rate schedules: pure functions from the number of an update (from 0) to a factor of the base rate.
//
// n total updates, w warm-up updates, i this update.  Two rules of two ancestors:
//   torchtitan: (i+1)/w while i < w; then 1; then over the last D updates min + (1-min) g(x) with x =
//   (i+1-w-S)/D,
//     S = n+1-w-D, g(x) = 1-x (linear), 1-sqrt(x) (sqrt), (1+cos(pi x))/2 (cosine).  The virtual update n+1
//     is the one at the minimum, so that no update has a rate of 0.   (torchtitan/components/lr_scheduler.py)
//   verl: i/w while i < w (the first update has a rate of 0); then constant, a cosine over n-w, or wsd:
//   floor((n-w) stable)
//     updates at 1, a cosine over the rest, the minimum from n on.   (verl/utils/torch_functional.py)
#pragma once
#include <cstdint>
#include <functional>
#include <string>

namespace titanium {

enum class LrDecay { kConstant, kLinear, kSqrt, kCosine, kWsd };
LrDecay parse_lr_decay(const std::string& name);  // "constant", "linear", "sqrt", "cosine", "wsd"; BadConfig

struct LrScheduleOptions {
  int64_t total_steps = 0;
  int64_t warmup_steps = 0;
  LrDecay decay = LrDecay::kLinear;
  double decay_ratio =
      -1;  // torchtitan: the last round(n ratio) updates decay; below 0: all that follow the warm-up
  double stable_ratio = 0.9;  // wsd: the part of the updates after the warm-up that stays at 1
  double min_lr_factor = 0;
  double cycles = 0.5;  // verl's cosine: waves of it over the updates after the warm-up (num_cycles)
};

using LrFactor = std::function<double(int64_t step)>;

// constant and wsd follow the warm-up rule too; wsd is the cosine with D = n-w - floor((n-w) stable_ratio).
// A warm-up above n is cut to n, a decay above n-w to n-w.  From n on the factor stays at the minimum (1
// where nothing decays).  BadConfig: total_steps < 1, a negative warm-up, a ratio or minimum outside [0, 1].
LrFactor torchtitan_schedule(const LrScheduleOptions& options);

// kConstant, kCosine or kWsd; BadConfig for the others.  zero_indexed false: i+1 in place of i (cosine's
// `zero_indexed_step`).
LrFactor verl_schedule(const LrScheduleOptions& options, bool zero_indexed = true);

// The schedule of a run and where it is.  The position is the only state.
class LRSchedulersContainer {
 public:
  LRSchedulersContainer(LrFactor factor, double base_lr) : factor_(std::move(factor)), base_lr_(base_lr) {}

  double lr() const { return base_lr_ * factor_(step_); }  // of the next update
  double lr_at(int64_t step) const { return base_lr_ * factor_(step); }
  void step() { ++step_; }
  int64_t position() const { return step_; }  // updates done
  void set_position(int64_t step) { step_ = step; }

 private:
  LrFactor factor_;
  double base_lr_;
  int64_t step_ = 0;
};

}  // namespace titanium
