// Makes the next steps' samples on a thread of its own while the current step runs.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <vector>

#include "titanium/batch/sample.h"
#include "titanium/data/dataset.h"
#include "titanium/data/sampler.h"

namespace titanium {

struct Step {
  int64_t begin = 0, end = 0;    // positions, see StepRecords
  std::vector<int64_t> records;  // [end - begin]
  std::vector<Sample> samples;   // [end - begin], samples[i].index = i
};

class Loader {
 public:
  // The step that starts at a position; empty after the last.  Called on the loader's thread, never twice at
  // once.
  using Source = std::function<std::optional<Step>(int64_t position)>;

  // Starts at `position`: 0, or what position() gave when the run was saved.  `ahead` steps at most are made
  // in advance. data must outlive the loader.
  Loader(const Dataset& data, const Sampler& sampler, int64_t position = 0, int ahead = 2);
  Loader(Source source, int64_t position, int ahead = 2);
  ~Loader();  // waits for a Source, and leaves a step of a data set half-made
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next step; empty after the last, and soon after `stop` is true (then the step may be had later).
  // Throws what making that step threw, at that step and at every later call.
  std::optional<Step> next(const std::atomic<bool>* stop = nullptr);

  // Samples consumed by the steps that next() has given: what to save.  Steps made in advance do not count.
  int64_t position() const { return position_; }

 private:
  // Answers empty where it is asked to stop.
  using Maker = std::function<std::optional<Step>(int64_t position, const std::stop_token&)>;
  struct Shared;
  static std::unique_ptr<Shared> start(Maker maker, int64_t position, int ahead);

  std::unique_ptr<Shared> shared_;
  int64_t position_;
};

}  // namespace titanium
