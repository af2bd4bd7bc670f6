#include "titanium/train/estimate.h"

#include <fmt/format.h>

#include <algorithm>

#include "titanium/report/format.h"

namespace titanium {
namespace {

std::string shown(double n) {
  return human_bytes(static_cast<uint64_t>(n));
}

int64_t size_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

// A unit as this rank's tensor-parallel coordinate has it, on any pipeline rank.
struct UnitFacts {
  bool trainable;
  int64_t numel, part;
  int replicas, replicate;
  bool whole() const { return replicas == 1; }
  double from_others() const { return static_cast<double>(numel) * (replicas - 1) / replicas; }
  bool adds_in_place() const { return whole() && replicate == 1; }
};

std::vector<UnitFacts> units_of(const TrainStep& step, size_t rank) {
  const ParamStore& store = step.store();
  std::vector<UnitFacts> facts;
  for (const int32_t unit : step.parts()[rank].units) {
    const UnitPlace& place = store.places()[unit];
    const UnitSize size = store.size_of(place);
    facts.push_back(
        {place.trainable, size.numel, size.part, size.replicas, store.mesh().dims().dp_replicate});
  }
  return facts;
}

int64_t stream_bytes(const TrainStep& step, const StepShape& shape) {
  return shape.tokens / step.store().mesh().tp().size() * step.model().config.hidden_size *
         size_of(step.store().dtypes().compute);
}

PlanBytes plan_bytes(const TrainStep& step, size_t rank, const StepShape& shape) {
  const StoreDtypes& dtypes = step.store().dtypes();
  PlanBytes bytes;
  for (const int32_t block : step.parts()[rank].blocks) {
    const Block::Bytes b =
        step.model().blocks[block]->bytes(shape.tokens, size_of(dtypes.compute), step.options().keep_cheap);
    bytes.blocks.push_back({.input = stream_bytes(step, shape),
                            .saved = b.saved,
                            .forward_work = b.forward_work,
                            .backward_work = b.backward_work});
  }
  for (const UnitFacts& unit : units_of(step, rank)) {
    bytes.units.push_back(
        {.weights = unit.whole() ? 0 : unit.numel * size_of(dtypes.compute),  // else they are not given back
         .gradient = unit.trainable && !unit.adds_in_place() ? unit.numel * size_of(dtypes.reduce) : 0});
  }
  return bytes;
}

bool starts(const Action& action) {
  return action.half != Half::kWait;
}

AxisBytes axis_bytes(const TrainStep& step, size_t rank, const Plan& plan, const StepShape& shape) {
  const StoreDtypes& dtypes = step.store().dtypes();
  const std::vector<UnitFacts> units = units_of(step, rank);
  const auto stream = static_cast<double>(stream_bytes(step, shape));
  AxisBytes bytes;
  for (const Action& a : plan) {
    switch (a.kind) {
      case Kind::kUnshard:
        if (starts(a)) bytes.dp_shard += units[a.unit].from_others() * size_of(dtypes.compute);
        break;
      case Kind::kReduce:
        if (!starts(a)) break;
        bytes.dp_shard += units[a.unit].from_others() * size_of(dtypes.reduce);
        bytes.dp_replicate += 2.0 * static_cast<double>(units[a.unit].part) * (units[a.unit].replicate - 1) /
                              units[a.unit].replicate * size_of(dtypes.reduce);
        break;
      case Kind::kForward:
      case Kind::kRecompute:
      case Kind::kBackward:
      case Kind::kBackwardInput: {
        const Block::Cost cost = step.model().blocks[step.parts()[rank].blocks[a.block]]->cost(
            shape.tokens, shape.document, size_of(dtypes.compute));
        const bool again =
            a.kind != Kind::kForward && a.kind != Kind::kRecompute && !step.options().keep_cheap;
        bytes.tp += cost.tp_bytes + (again ? cost.tp_again_bytes : 0);
        break;
      }
      case Kind::kRecvInput:
      case Kind::kRecvOutputGrad:
        if (starts(a)) bytes.pp += stream;
        break;
      default:
        break;
    }
  }
  return bytes;
}

int64_t state_bytes(const Optimizer& optimizer, const StoreDtypes& dtypes) {
  const at::ScalarType state = dtypes.param == at::kDouble ? at::kDouble : optimizer.options().state_dtype;
  return size_of(state) * static_cast<int64_t>(optimizer.state_names().size());
}

}  // namespace

std::string RunMemory::text() const {
  const auto bytes = [](int64_t n) { return human_bytes(static_cast<uint64_t>(n)); };
  return fmt::format(
      "about {}: masters {}, optimizer {}, gradients {}, cast weights {}, activations {}, recompute {}, work "
      "{}, free buffers of units {}",
      bytes(total()), bytes(masters), bytes(optimizer), bytes(gradients), bytes(weights), bytes(activations),
      bytes(recompute), bytes(work), bytes(pooled));
}

std::string AxisBytes::text() const {
  return fmt::format("dp_shard {}, dp_replicate {}, tp {}, pp {}", shown(dp_shard), shown(dp_replicate),
                     shown(tp), shown(pp));
}

double update_bytes(const Optimizer& optimizer, const StoreDtypes& dtypes) {
  // Gradients are read for the norm, read again and zeroed; masters and state are read and written.
  return 3.0 * static_cast<double>(size_of(dtypes.reduce)) +
         2.0 * static_cast<double>(size_of(dtypes.param)) +
         2.0 * static_cast<double>(state_bytes(optimizer, dtypes));
}

StepShape step_shape(const TrainingConfig& config, const ParallelDims& dims) {
  const int64_t tokens =
      config.global_batch_tokens > 0 ? config.global_batch_tokens : config.global_batch_size * config.seq_len;
  const int64_t data = int64_t{dims.dp_replicate} * dims.dp_shard, budget = config.max_tokens_per_microbatch;
  const int64_t documents = std::max<int64_t>(1, budget / config.seq_len);  // in a micro-batch
  const int64_t of_rank = (tokens + data - 1) / data;
  const int64_t per_micro_batch = config.seq_len <= budget ? documents * config.seq_len : budget;
  return {budget, std::min(config.seq_len, budget),
          static_cast<int32_t>(
              std::clamp<int64_t>((of_rank + per_micro_batch - 1) / per_micro_batch, 1, 1 << 20))};
}

StepEstimate estimate_step(const TrainStep& step, const Optimizer& optimizer, const StepShape& shape) {
  StepEstimate estimate;
  estimate.tasks = step.tasks(shape.micro_batches, /*forward_only=*/false);
  estimate.plans = step.plans(estimate.tasks);
  const StoreDtypes& dtypes = step.store().dtypes();
  for (size_t rank = 0; rank < estimate.plans.size(); ++rank) {
    StepEstimate::Rank r;
    int64_t gradients = 0;  // kept between plans, to add to and to clip
    int64_t casts = 0;      // kept until an update makes them anew
    for (const UnitFacts& unit : units_of(step, rank)) {
      r.memory.masters += unit.part * size_of(dtypes.param);
      if (unit.whole() && dtypes.param != dtypes.compute) casts += unit.numel * size_of(dtypes.compute);
      if (!unit.trainable) continue;
      gradients += unit.part * size_of(dtypes.reduce);
      r.memory.optimizer += unit.part * state_bytes(optimizer, dtypes);
    }
    const MemoryUse peak = simulate_memory(estimate.plans[rank], estimate.tasks[rank],
                                           plan_bytes(step, rank, shape), &r.over_plan)
                               .at_peak;
    r.memory.weights = casts + peak.weights;
    r.memory.gradients = gradients + peak.gradients;
    r.memory.activations = peak.activations;
    r.memory.recompute = peak.recompute;
    r.memory.work = peak.work;
    r.memory.pooled = peak.pooled;
    r.always = r.memory.masters + r.memory.optimizer + gradients + casts;
    r.bytes = axis_bytes(step, rank, estimate.plans[rank], shape);
    estimate.ranks.push_back(std::move(r));
  }
  return estimate;
}

std::vector<PlanCosts> estimate_costs(const TrainStep& step, const Optimizer& optimizer,
                                      const StepEstimate& estimate, const StepShape& shape,
                                      const Hardware& hw) {
  const StoreDtypes& dtypes = step.store().dtypes();
  const auto take = [](const Hardware::Link& link, double bytes, int calls = 1) {
    return bytes > 0 ? bytes / link.bandwidth + calls * link.latency : 0;
  };
  std::vector<PlanCosts> all;
  for (size_t rank = 0; rank < estimate.plans.size(); ++rank) {
    PlanCosts costs;
    costs.action = hw.action;
    costs.overlap = hw.overlap;
    for (const int32_t block : step.parts()[rank].blocks) {
      const Block::Cost c =
          step.model().blocks[block]->cost(shape.tokens, shape.document, size_of(dtypes.compute));
      const double tp = take(hw.tp, c.tp_bytes, c.tp_calls);
      const double again = step.options().keep_cheap ? 0 : take(hw.tp, c.tp_again_bytes, c.tp_again_calls);
      PlanCosts::Block b;
      b.forward = c.matmul / hw.matmul + c.attention / hw.attention + tp;
      // The head forms the gradients of its products with the loss, in its forward.
      b.forward += kHeadProducts * c.head / hw.head;
      if (block == 0) b.forward += static_cast<double>(stream_bytes(step, shape)) / hw.copy;
      b.backward_weight = c.matmul / hw.matmul_backward;
      b.backward_input =
          b.backward_weight + kAttentionBackward * c.attention / hw.attention_backward + tp + again;
      b.transfer = take(hw.pp, static_cast<double>(stream_bytes(step, shape)));
      costs.blocks.push_back(b);
    }
    double weights = 0;
    for (const UnitFacts& unit : units_of(step, rank)) {
      const auto part = static_cast<double>(unit.part);
      PlanCosts::Unit u;
      if (!unit.whole()) {
        u.unshard = take(hw.dp_shard, unit.from_others() * size_of(dtypes.compute));
        u.cast = part * (size_of(dtypes.param) + size_of(dtypes.compute)) / hw.copy;
      }
      if (unit.trainable) {
        u.reduce =
            take(hw.dp_shard, unit.from_others() * size_of(dtypes.reduce)) +
            take(hw.dp_replicate, 2 * part * (unit.replicate - 1) / unit.replicate * size_of(dtypes.reduce));
        if (!unit.adds_in_place()) u.add = 3 * part * size_of(dtypes.reduce) / hw.copy;
        weights += part;
      }
      costs.units.push_back(u);
    }
    costs.update = weights * update_bytes(optimizer, dtypes) / hw.update;
    all.push_back(std::move(costs));
  }
  return all;
}

}  // namespace titanium
