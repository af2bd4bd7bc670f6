// What a person sees while training runs.
#pragma once
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

namespace titanium {

struct Progress {
  int64_t step = 0, steps = 0;  // done and planned; steps 0 where the end is not known
  double loss = 0;
  double lr = 0;
  std::optional<double> grad_norm;  // before clipping
  double tokens_per_second = 0;
  std::optional<double> mfu;  // 0 to 1
  uint64_t memory_bytes = 0;  // 0 leaves it out
  std::optional<double> eta_seconds;
};

// "step 12/300  loss 2.3145  lr 1.00e-05  grad 1.23  410 tok/s  MFU 23.1%  mem 2.10 GiB  ETA 3m05s"
std::string progress_text(const Progress& progress);

// Seconds that are left, from the steps timed so far.  The first `skip` steps of a run are slower (memory is
// touched for the first time) and are left out of the rate.  Pure: the caller gives the clock.
class EtaClock {
 public:
  explicit EtaClock(int64_t skip = 1) : skip_(skip < 1 ? 1 : skip) {}
  void step_done(double now_seconds);                   // after each step
  std::optional<double> eta(int64_t steps_left) const;  // empty before there is a rate

 private:
  int64_t skip_, seen_ = 0;
  double begin_ = 0, last_ = 0;
};

// A terminal shows one line that is rewritten (the last one stays); anything else gets plain lines through
// `log`. Only rank 0 should own one.
class ProgressLine {
 public:
  using LogLine = std::function<void(const std::string&)>;
  // `terminal` is stdout or stderr where that is a terminal, nullptr for plain lines.
  ProgressLine(std::FILE* terminal, LogLine log);
  ~ProgressLine();  // ends the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void show(const Progress& progress);
  // Ends the line so that something else can be printed; the next show() starts a new one.
  void finish();

 private:
  std::FILE* terminal_;
  LogLine log_;
  bool open_ = false;
};

}  // namespace titanium
