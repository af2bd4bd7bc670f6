#include "titanium/schedule/memory.h"

#include <algorithm>
#include <map>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// One block and one micro-batch: what it holds.
struct Held {
  Save saved = Save::kNothing;
  int64_t recomputed = 0;
};

void raise(MemoryUse& peak, const MemoryUse& now) {
  peak.weights = std::max(peak.weights, now.weights);
  peak.gradients = std::max(peak.gradients, now.gradients);
  peak.activations = std::max(peak.activations, now.activations);
  peak.recompute = std::max(peak.recompute, now.recompute);
  peak.work = std::max(peak.work, now.work);
  peak.pooled = std::max(peak.pooled, now.pooled);
}

// Buffers of units by their size: how many are in use, and the most that ever were.
class Pool {
 public:
  void take(int64_t bytes) {
    Count& count = counts_[bytes];
    count.most = std::max(count.most, ++count.now);
  }
  void give_back(int64_t bytes) { --counts_[bytes].now; }
  int64_t free_bytes() const {
    int64_t sum = 0;
    for (const auto& [bytes, count] : counts_) sum += bytes * (count.most - count.now);
    return sum;
  }

 private:
  struct Count {
    int64_t now = 0, most = 0;
  };
  std::map<int64_t, Count> counts_;
};

// One run of the plan, with the buffers that `pool` has from the runs before.
MemoryEstimate run(const Plan& plan, const PlanTask& task, const PlanBytes& bytes, Pool& pool,
                   std::vector<MemoryUse>* over_plan) {
  const ModelPart& part = task.part;
  std::vector<Held> held(part.blocks.size() * static_cast<size_t>(task.micro_batches));
  std::vector<bool> has_gradient(part.units.size(), false);
  MemoryEstimate estimate;
  MemoryUse now;
  int64_t host = 0;

  const auto need_gradient = [&](int32_t u) {
    if (!part.units[u].trainable || has_gradient[u]) return;
    has_gradient[u] = true;
    now.gradients += bytes.units[u].gradient;
    pool.take(bytes.units[u].gradient);
  };
  const auto held_bytes = [&](const Held& h, int32_t block) {
    if (h.saved == Save::kNothing) return int64_t{0};
    return h.saved == Save::kInput || h.recomputed > 0 ? bytes.blocks[block].input
                                                       : bytes.blocks[block].saved;
  };

  for (size_t i = 0; i < plan.size(); ++i) {
    const Action& a = plan[i];
    Held none;  // where the action names no block
    Held& h =
        names_block(a.kind)
            ? held[static_cast<size_t>(a.micro_batch) * part.blocks.size() + static_cast<size_t>(a.block)]
            : none;
    // What the action takes counts while it runs; what it frees counts until it has run.
    MemoryUse freed;
    int64_t given_back = 0;
    now.work = 0;
    switch (a.kind) {
      case Kind::kUnshard:
        if (a.half == Half::kStart) {
          now.weights += bytes.units[a.unit].weights;
          pool.take(bytes.units[a.unit].weights);
        }
        break;
      case Kind::kReshard:
        freed.weights = given_back = bytes.units[a.unit].weights;
        break;
      case Kind::kForward:
        h.saved = a.save;
        now.activations += held_bytes(h, a.block);
        now.work = bytes.blocks[a.block].forward_work;
        if (adds_in_forward(a, part)) {
          for (const int32_t u : part.blocks[a.block].units) need_gradient(u);
        }
        break;
      case Kind::kRecompute:
        h.recomputed = bytes.blocks[a.block].saved - bytes.blocks[a.block].input;
        now.recompute += h.recomputed;
        now.work = bytes.blocks[a.block].forward_work;
        break;
      case Kind::kBackward:
      case Kind::kBackwardInput:
      case Kind::kBackwardWeight:
        now.work = bytes.blocks[a.block].backward_work;
        if (adds_gradient(a.kind)) {
          for (const int32_t u : part.blocks[a.block].units) need_gradient(u);
          freed.activations = held_bytes(h, a.block);
          freed.recompute = h.recomputed;
          h = {};
        }
        break;
      case Kind::kReduce:
        if (a.half == Half::kStart) {
          need_gradient(a.unit);  // of zeros where this rank had no work for it
        } else if (a.half == Half::kWait) {
          freed.gradients = given_back = bytes.units[a.unit].gradient;
          has_gradient[a.unit] = false;
        }
        break;
      case Kind::kOffload:
        if (a.half == Half::kStart) {
          host += held_bytes(h, a.block);
        } else {
          freed.activations = held_bytes(h, a.block);
        }
        break;
      case Kind::kOnload:
        if (a.half == Half::kStart) {
          now.activations += held_bytes(h, a.block);
        } else {
          host -= held_bytes(h, a.block);
        }
        break;
      case Kind::kLoss:
      case Kind::kSendOutput:
      case Kind::kRecvInput:
      case Kind::kSendInputGrad:
      case Kind::kRecvOutputGrad:
        break;
    }
    now.pooled = pool.free_bytes();
    raise(estimate.peak, now);
    if (over_plan != nullptr) over_plan->push_back(now);
    estimate.host = std::max(estimate.host, host);
    if (estimate.action < 0 || now.total() > estimate.at_peak.total()) {
      estimate.at_peak = now;
      estimate.action = static_cast<int64_t>(i);
    }
    now.weights -= freed.weights;
    now.gradients -= freed.gradients;
    now.activations -= freed.activations;
    now.recompute -= freed.recompute;
    if (given_back > 0) pool.give_back(given_back);
  }
  return estimate;
}

}  // namespace

MemoryEstimate simulate_memory(const Plan& plan, const PlanTask& task, const PlanBytes& bytes,
                               std::vector<MemoryUse>* over_plan) {
  const ModelPart& part = task.part;
  if (bytes.blocks.size() != part.blocks.size() || bytes.units.size() != part.units.size()) {
    throw Bug("plan memory: bytes of {} blocks and {} units given for {} and {}", bytes.blocks.size(),
              bytes.units.size(), part.blocks.size(), part.units.size());
  }
  Pool pool;
  run(plan, task, bytes, pool, nullptr);
  return run(plan, task, bytes, pool, over_plan);
}

}  // namespace titanium
