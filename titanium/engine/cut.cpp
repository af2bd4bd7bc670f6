#include "titanium/engine/cut.h"

#include <limits>
#include <numeric>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr const char* kBudgetKey = "max_token_len_per_gpu";
constexpr const char* kSequencesKey = "micro_batch_size_per_gpu";

Groups consecutive(int64_t samples, int64_t each) {
  if (samples % each != 0) {
    throw BadData("the batch has {} samples, which {} = {} does not divide", samples, kSequencesKey, each);
  }
  Groups groups;
  for (int64_t i = 0; i < samples; i += each) {
    groups.emplace_back(static_cast<size_t>(each));
    std::iota(groups.back().begin(), groups.back().end(), i);
  }
  return groups;
}

void check_given(const Groups& groups, int64_t samples) {
  std::vector<char> seen(static_cast<size_t>(samples), 0);
  for (const auto& group : groups) {
    for (const int64_t i : group) {
      if (i < 0 || i >= samples) throw BadData("a micro-batch names sample {}; the batch has {}", i, samples);
      if (seen[static_cast<size_t>(i)]++) throw BadData("sample {} is given to two micro-batches", i);
    }
  }
  for (int64_t i = 0; i < samples; ++i) {
    if (!seen[static_cast<size_t>(i)]) throw BadData("sample {} is given to no micro-batch", i);
  }
}

}  // namespace

MicroBatching resolve(const MicroBatching& micro, const EngineRunConfig& config, bool forward_only) {
  if (micro.sequences < 0 || micro.max_tokens < 0 || micro.count_divisor < 1) {
    throw BadConfig("{} = {}, {} = {}, a multiple of {} micro-batches: allowed: numbers > 0", kSequencesKey,
                    micro.sequences, kBudgetKey, micro.max_tokens, micro.count_divisor);
  }
  const int set = !micro.given.empty() + (micro.sequences > 0) + (micro.max_tokens > 0);
  if (set > 1) {
    throw BadConfig("{} given micro-batches, {} = {} and {} = {}: one of them says how a batch is cut",
                    micro.given.size(), kSequencesKey, micro.sequences, kBudgetKey, micro.max_tokens);
  }
  if (micro.count_divisor > 1 && (micro.sequences > 0 || !micro.given.empty())) {
    throw BadConfig("a multiple of {} micro-batches is for {}; here {} says how a batch is cut",
                    micro.count_divisor, kBudgetKey,
                    micro.sequences > 0 ? kSequencesKey : "the list of given ones");
  }
  if (set == 1) return micro;
  const auto of = [&](int64_t infer, int64_t train) { return forward_only && infer > 0 ? infer : train; };
  MicroBatching out = micro;
  if (config.use_dynamic_bsz) {
    out.max_tokens = of(config.infer_max_token_len_per_gpu, config.max_token_len_per_gpu);
  } else {
    out.sequences = of(config.infer_micro_batch_size_per_gpu, config.micro_batch_size_per_gpu);
  }
  if (out.max_tokens == 0 && out.sequences == 0) {
    throw BadConfig(
        "neither the batch (micro) nor engine.{} (use_dynamic_bsz = {}) says how a batch becomes "
        "micro-batches",
        config.use_dynamic_bsz ? kBudgetKey : kSequencesKey, config.use_dynamic_bsz);
  }
  return out;
}

std::vector<PackedBatch> cut(const std::vector<WeighedSample>& samples, const MicroBatching& micro,
                             const EngineRunConfig& config, bool keep_groups, int64_t at_least) {
  if (samples.empty()) return {};
  PackOptions options;
  options.keep_groups = keep_groups;
  options.pad_to_multiple = config.dims.tp;
  if (micro.max_tokens > 0) {
    // Context parallelism shares a micro-batch's tokens.
    if (__builtin_mul_overflow(micro.max_tokens, int64_t{config.dims.cp}, &options.split.budget))
      options.split.budget = std::numeric_limits<int64_t>::max();
    options.split.budget_key =
        config.dims.cp == 1 ? kBudgetKey : fmt::format("{} x context_parallel_size", kBudgetKey);
    options.split.divisor = micro.count_divisor;
    options.split.at_least = at_least;
    options.split.allow_empty = at_least > 1;
    return pack(samples, options);
  }
  const auto n = static_cast<int64_t>(samples.size());
  options.split.budget = std::numeric_limits<int64_t>::max();
  if (micro.sequences > 0) return pack(samples, consecutive(n, micro.sequences), options);
  check_given(micro.given, n);
  return pack(samples, micro.given, options);
}

}  // namespace titanium
