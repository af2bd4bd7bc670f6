#include "titanium/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>

#include "titanium/base/error.h"
#include "titanium/optim/kernels.h"
#include "titanium/shard/buffer.h"

namespace titanium {
namespace {

constexpr int64_t kGrain = 1 << 15;  // elements a thread takes at least

Element element(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Element::kF32;
    case at::kBFloat16:
      return Element::kBF16;
    case at::kDouble:
      return Element::kF64;
    default:
      throw Bug("no optimizer kernel for {}", c10::toString(dtype));
  }
}

// A flat tensor as bytes from element i on; null for an undefined one.
struct Flat {
  explicit Flat(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    data = static_cast<char*>(tensor.data_ptr());
    width = static_cast<int64_t>(tensor.element_size());
  }
  void* at(int64_t i) const { return data == nullptr ? nullptr : data + i * width; }
  char* data = nullptr;
  int64_t width = 0;
};

// Where the update also leaves the new masters in bf16 for the next forward and for weight sync, so that
// neither has to read them again.
at::Tensor cast_of(const Unit& unit) {
  return unit.dtypes().compute == at::kBFloat16 ? unit.cast_to_write() : at::Tensor();
}

void check(bool ok, const char* key, double value, const char* allowed) {
  if (!ok) throw BadConfig("[optimizer] {} = {}: allowed: {}", key, value, allowed);
}

void validate(const OptimizerOptions& options) {
  check(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "a number in [0, 1)");
  check(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "a number in [0, 1)");
  // At eps 0 an element whose gradients were all 0 would become 0/0.
  check(options.eps > 0 && std::isfinite(options.eps), "eps", options.eps, "a number > 0");
  check(options.weight_decay >= 0 && std::isfinite(options.weight_decay), "weight_decay",
        options.weight_decay, "a number >= 0");
  check(options.momentum >= 0 && options.momentum < 1, "momentum", options.momentum, "a number in [0, 1)");
  if (options.state_dtype != at::kFloat && options.state_dtype != at::kBFloat16) {
    throw BadConfig(
        "[optimizer] state_dtype = {}: allowed: float32, bfloat16 (masters in float64 have float64 state)",
        c10::toString(options.state_dtype));
  }
}

}  // namespace

Optimizer::Optimizer(ParamStore& store, OptimizerOptions options)
    : store_(store), options_(std::move(options)) {
  validate(options_);
}

void Optimizer::set_options(const OptimizerOptions& options) {
  validate(options);
  if (options.name != options_.name || options.state_dtype != options_.state_dtype ||
      (options.momentum != 0) != (options_.momentum != 0)) {
    throw BadConfig(
        "[optimizer] name, state_dtype and whether there is momentum are kept for the whole run, as the "
        "state "
        "is theirs: {}, {}, {}",
        options_.name, c10::toString(options_.state_dtype), options_.momentum);
  }
  options_ = options;
  ranges_.clear();
}

void Optimizer::step(const UpdateOptions& update) {
  if (!std::isfinite(update.lr) || !std::isfinite(update.clip)) {
    throw Bug("an update with learning rate {} and clip coefficient {}: skip it instead", update.lr,
              update.clip);
  }
  store_.check_free();
  const at::NoGradGuard no_grad;
  ++updates_;
  for (const auto& unit : store_.units()) {
    if (!unit->trainable() || !unit->has_grad()) continue;
    store_.before_write(*unit);
    for (const std::string& name : state_names()) make_state(*unit, name);
    const at::Tensor cast = cast_of(*unit);
    this->update(*unit, cast, ranges_of(*unit), update);
    unit->written(/*cast_too=*/cast.defined());
  }
}

at::ScalarType Optimizer::state_dtype(const Unit& unit) const {
  return unit.dtypes().param == at::kDouble ? at::kDouble : options_.state_dtype;
}

at::Tensor Optimizer::state(const Unit& unit, const std::string& name) const {
  const auto of_unit = state_.find(&unit);
  if (of_unit == state_.end()) return {};
  const auto found = of_unit->second.find(name);
  return found == of_unit->second.end() ? at::Tensor() : found->second;
}

at::Tensor Optimizer::make_state(const Unit& unit, const std::string& name) {
  at::Tensor& state = state_[&unit][name];
  if (!state.defined()) state = zero_pages(unit.shard().numel(), state_dtype(unit));
  return state;
}

void Optimizer::drop_state(const Unit& unit) {
  state_.erase(&unit);
}

uint64_t Optimizer::bytes() const {
  uint64_t sum = 0;
  for (const auto& [unit, states] : state_) {
    for (const auto& [name, tensor] : states) sum += tensor.nbytes();
  }
  return sum;
}

uint64_t Optimizer::bytes_planned() const {
  uint64_t sum = 0;
  for (const auto& unit : store_.units()) {
    if (!unit->trainable()) continue;
    sum += static_cast<uint64_t>(unit->shard().numel()) * c10::elementSize(state_dtype(*unit)) *
           state_names().size();
  }
  return sum;
}

const std::vector<Optimizer::Range>& Optimizer::ranges_of(const Unit& unit) {
  std::vector<Range>& ranges = ranges_[&unit];
  if (!ranges.empty()) return ranges;
  // Gaps are zero and stay zero, so neighbours with the same decay are one run.
  for (const Slice& slice : store_.slices()) {
    if (slice.unit != &unit) continue;
    const bool decays = options_.decay_norms_and_biases || slice.weight->shape().size() > 1;
    const double decay = decays ? options_.weight_decay : 0;
    if (ranges.empty() || ranges.back().weight_decay != decay) ranges.push_back({slice.offset, 0, decay});
    ranges.back().end = slice.offset + slice.end - slice.begin;
  }
  return ranges;
}

void AdamW::update(Unit& unit, const at::Tensor& cast, const std::vector<Range>& ranges,
                   const UpdateOptions& update) {
  const at::Tensor grads = unit.grad_shard();
  const at::Tensor exp_avg = state(unit, "exp_avg"), exp_avg_sq = state(unit, "exp_avg_sq");
  const Flat p(unit.shard()), g(grads), m(exp_avg), v(exp_avg_sq), bf16(cast);
  const AdamWKernel kernel = adamw_kernel(element(unit.shard().scalar_type()), element(grads.scalar_type()),
                                          element(exp_avg.scalar_type()));
  if (kernel == nullptr)
    throw Bug("unit '{}': gradients in {}", unit.name(), c10::toString(grads.scalar_type()));
  AdamWCoefficients c{};
  c.clip = update.clip;
  c.beta1 = options().beta1;
  c.beta2 = options().beta2;
  c.rate = update.lr / (1 - std::pow(options().beta1, static_cast<double>(updates())));
  c.correction = 1 / std::sqrt(1 - std::pow(options().beta2, static_cast<double>(updates())));
  c.eps = options().eps;
  for (const Range& range : ranges) {
    c.keep = 1 - update.lr * range.weight_decay;
    at::parallel_for(range.begin, range.end, kGrain, [&](int64_t from, int64_t to) {
      kernel(p.at(from), g.at(from), m.at(from), v.at(from), bf16.at(from), to - from, c, update.zero_grad);
    });
  }
}

void SGD::update(Unit& unit, const at::Tensor& cast, const std::vector<Range>& ranges,
                 const UpdateOptions& update) {
  const at::Tensor grads = unit.grad_shard();
  const at::Tensor buffer = state(unit, "momentum_buffer");  // undefined without momentum
  const Flat p(unit.shard()), g(grads), b(buffer), bf16(cast);
  const SgdKernel kernel = sgd_kernel(element(unit.shard().scalar_type()), element(grads.scalar_type()),
                                      element(state_dtype(unit)));
  if (kernel == nullptr)
    throw Bug("unit '{}': gradients in {}", unit.name(), c10::toString(grads.scalar_type()));
  SgdCoefficients c{update.clip, update.lr, 0, options().momentum};
  for (const Range& range : ranges) {
    c.weight_decay = range.weight_decay;
    at::parallel_for(range.begin, range.end, kGrain, [&](int64_t from, int64_t to) {
      kernel(p.at(from), g.at(from), b.at(from), bf16.at(from), to - from, c, update.zero_grad);
    });
  }
}

std::unique_ptr<Optimizer> make_optimizer(ParamStore& store, const OptimizerOptions& options) {
  if (options.name == "AdamW") return std::make_unique<AdamW>(store, options);
  if (options.name == "SGD") return std::make_unique<SGD>(store, options);
  throw BadConfig("[optimizer] name = '{}': allowed: AdamW, SGD", options.name);
}

}  // namespace titanium
