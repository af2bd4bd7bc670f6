// Which samples form a step: a pure function of (seed, step), never of the layout of ranks (design D5).
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace titanium {

// What becomes of the samples at the end of the last epoch that do not fill a batch.
enum class LastBatch {
  kDrop,  // left out: steps = floor(samples / batch).  1000 samples, batch 128, 3 epochs: 23 steps, 56
          // samples left out
  kKeep,  // a last, shorter batch, weighed by its own counts: 24 steps
  kFail,  // BadConfig where there are any
};
LastBatch last_batch_from(std::string_view name);  // "drop", "keep", "fail"; BadConfig

struct SamplerOptions {
  uint64_t seed = 0;
  bool shuffle = true;  // a new permutation every epoch; false: the order of the records, every epoch
  int64_t global_batch_size = 0;  // samples of a step; or
  int64_t global_batch_tokens =
      0;               // as many consecutive samples as fit this many tokens.  One of the two is > 0.
  int64_t epochs = 0;  // 0: without end
  LastBatch last_batch = LastBatch::kDrop;
};

// The samples of a step.  Positions count samples of all epochs laid end to end: sample p is entry p mod n of
// epoch p / n.  Batches run on over the ends of epochs.
struct StepRecords {
  int64_t begin = 0, end = 0;    // positions [begin, end)
  std::vector<int64_t> records;  // [end - begin], record numbers, in the step's order
};

class Sampler {
 public:
  // `records` are the numbers to draw from, e.g. Dataset::train().  `length` gives a record's tokens; needed
  // by global_batch_tokens alone, where a record longer than the budget is a BadData.  BadConfig: both or
  // none of the batch sizes, last_batch = fail with a rest, or no step at all (fewer samples than one batch).
  Sampler(std::vector<int64_t> records, const SamplerOptions& options,
          std::function<int64_t(int64_t record)> length = nullptr);

  // The step that starts at a position, empty after the last one.  A pure function of (seed, position): a
  // position is all that has to be saved, and a run may go on with another batch size exactly where it was.
  // BadData for a position that is negative or beyond the last epoch.
  std::optional<StepRecords> at(int64_t position) const;
  // Step s, counted from 0 at position 0.  By tokens this walks over the steps before it.
  std::optional<StepRecords> step(int64_t s) const;

  // Number of steps, and of samples that no step takes, in this many epochs from position 0.
  int64_t steps_for(int64_t epochs) const;
  int64_t left_out(int64_t epochs) const;

  int64_t size() const { return static_cast<int64_t>(records_->size()); }  // n, samples of an epoch
  double epoch(int64_t position) const { return static_cast<double>(position) / static_cast<double>(size()); }
  const SamplerOptions& options() const { return options_; }

 private:
  using Order = std::shared_ptr<const std::vector<int64_t>>;
  class Stream;  // records by position
  Order order(int64_t epoch) const;
  int64_t step_end(int64_t position, int64_t samples) const;  // end of the step at position; -1: no step
  std::pair<int64_t, int64_t> steps_and_rest(int64_t epochs) const;

  std::shared_ptr<const std::vector<int64_t>> records_;  // of all copies of this sampler
  SamplerOptions options_;
  std::function<int64_t(int64_t)> length_;
  // The last permutations made; only saves time.
  struct Cache {
    std::mutex mutex;
    std::vector<std::pair<int64_t, Order>> orders;
  };
  std::shared_ptr<Cache> cache_;
};

}  // namespace titanium
