#include "titanium/report/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "titanium/report/format.h"

namespace titanium {
namespace {

// Columns of the terminal; 0 where it is none.
size_t columns(std::FILE* terminal) {
  winsize size{};
  return ioctl(fileno(terminal), TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

}  // namespace

std::string progress_text(const Progress& p) {
  std::string text =
      p.steps > 0 ? fmt::format("step {}/{}", p.step, p.steps) : fmt::format("step {}", p.step);
  text += fmt::format("  loss {:.4f}  lr {:.2e}", p.loss, p.lr);
  if (p.grad_norm) text += fmt::format("  grad {}", human_number(*p.grad_norm));
  text += fmt::format("  {} tok/s", human_number(p.tokens_per_second));
  if (p.mfu) text += fmt::format("  MFU {:.1f}%", 100 * *p.mfu);
  if (p.memory_bytes > 0) text += fmt::format("  mem {}", human_bytes(p.memory_bytes));
  if (p.eta_seconds) text += fmt::format("  ETA {}", human_duration(*p.eta_seconds));
  return text;
}

void EtaClock::step_done(double now_seconds) {
  ++seen_;
  if (seen_ <= skip_) begin_ = now_seconds;
  last_ = now_seconds;
}

std::optional<double> EtaClock::eta(int64_t steps_left) const {
  const int64_t timed = seen_ - skip_;
  if (timed <= 0) return std::nullopt;
  return (last_ - begin_) / static_cast<double>(timed) * static_cast<double>(steps_left);
}

ProgressLine::ProgressLine(std::FILE* terminal, LogLine log) : terminal_(terminal), log_(std::move(log)) {}

ProgressLine::~ProgressLine() {
  finish();
}

void ProgressLine::show(const Progress& progress) {
  std::string text = progress_text(progress);
  if (terminal_ == nullptr) {
    if (log_) log_(text);
    return;
  }
  // A line that wraps could not be rewritten.
  if (const size_t width = columns(terminal_); width > 0 && text.size() >= width) text.resize(width - 1);
  std::fputs(fmt::format("\r{}\x1b[K", text).c_str(), terminal_);  // does not mind a terminal that is gone
  std::fflush(terminal_);
  open_ = true;
}

void ProgressLine::finish() {
  if (!open_) return;
  std::fputc('\n', terminal_);
  std::fflush(terminal_);
  open_ = false;
}

}  // namespace titanium
