#include "titanium/train/run_report.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "titanium/base/error.h"
#include "titanium/formats/json.h"
#include "titanium/report/format.h"
#include "titanium/report/memory.h"

namespace titanium {
namespace {

std::filesystem::path in_dump_folder(const TrainConfig& config, const std::string& path) {
  return std::filesystem::path(config.dump_folder) / path;
}

// An earlier run's file out of the way, under the first free name path.1, path.2, ...
void move_aside(const std::filesystem::path& path, Log& log) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error) || std::filesystem::file_size(path, error) == 0) return;
  std::filesystem::path aside;
  for (int n = 1; aside.empty() || std::filesystem::exists(aside, error); ++n) {
    aside = path;
    aside += fmt::format(".{}", n);
  }
  std::filesystem::rename(path, aside, error);
  if (error) throw BadConfig("{}: cannot be renamed: {}", path.string(), error.message());
  log.info("{} is of an earlier run: it is now {}", path.string(), aside.filename().string());
}

bool holds_validation(const std::filesystem::path& path, int64_t step) {
  std::ifstream in(path, std::ios::binary);
  for (std::string line; std::getline(in, line);) {
    Json json;
    std::string why;
    if (try_parse_json(line, {}, &json, &why) && json.is_object() && json.contains("validation_loss") &&
        json.value("step", Json()) == Json(step)) {
      return true;
    }
  }
  return false;
}

}  // namespace

RunReport::RunReport(const TrainConfig& config, int64_t resumed_step, int64_t steps, double peak_flops,
                     Log& log)
    : config_(config),
      log_(log),
      steps_(steps),
      peak_flops_(peak_flops),
      line_(isatty(STDERR_FILENO) ? stderr : nullptr,
            [&log](const std::string& text) { log.info("{}", text); }) {
  log_.set_before_line([this] { line_.finish(); });
  if (resumed_step > 0) recorded_validation_ = resumed_step;
  if (!config.metrics.jsonl_file.empty()) {
    const auto path = in_dump_folder(config, config.metrics.jsonl_file);
    if (resumed_step == 0) move_aside(path, log);
    jsonl_ = std::make_unique<JsonlMetrics>(path, resumed_step);
    if (!holds_validation(path, resumed_step)) recorded_validation_ = -1;
  }
  if (config.metrics.enable_tensorboard) {
    tensorboard_ = std::make_unique<TensorBoardWriter>(in_dump_folder(config, config.metrics.save_tb_folder),
                                                       resumed_step > 0 ? resumed_step + 1 : -1);
  }
}

RunReport::~RunReport() {
  log_.set_before_line(nullptr);
}

void RunReport::step(const StepReport& r) {
  // With what comes between updates: waiting for data, validation, saves.
  eta_.step_done(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count());
  const double rate = static_cast<double>(r.tokens) / r.seconds;
  const double mfu = peak_flops_ > 0 ? r.flops / r.seconds / peak_flops_ : 0;
  write(r.step, {{"loss", r.loss},
                 {"grad_norm", r.grad_norm},
                 {"lr", r.lr},
                 {"skipped", r.skipped},
                 {"tokens", r.tokens},
                 {"loss_tokens", r.trained},
                 {"micro_batches", r.micro_batches},
                 {"seconds", r.seconds},
                 {"tokens_per_second", rate},
                 {"mfu", mfu},
                 {"rss_bytes", static_cast<int64_t>(rss_bytes())},
                 {"peak_rss_bytes", static_cast<int64_t>(peak_rss_bytes())}});
  if (r.step % config_.metrics.log_freq != 0 && r.step != steps_) return;
  Progress p;
  p.step = r.step;
  p.steps = steps_;
  p.loss = r.loss;
  p.lr = r.lr;
  p.grad_norm = r.grad_norm;
  p.tokens_per_second = rate;
  if (peak_flops_ > 0) p.mfu = mfu;
  p.memory_bytes = rss_bytes();
  p.eta_seconds = eta_.eta(steps_ - r.step);
  line_.show(p);
}

void RunReport::validation(int64_t step, double loss) {
  if (step != recorded_validation_) write(step, {{"validation_loss", loss}});
  log_.info("step {}: validation loss {:.4f} a token (perplexity {:.2f})", step, loss, std::exp(loss));
}

void RunReport::write(int64_t step, const Metrics& metrics) {
  bool ok = !jsonl_ || jsonl_->write(step, metrics);
  if (tensorboard_) {
    for (const auto& [name, value] : metrics) {
      const double* number = std::get_if<double>(&value);
      if (number) ok = tensorboard_->scalar("train/" + name, step, *number) && ok;
    }
  }
  if (!ok && !disk_warned_) {
    disk_warned_ = true;
    log_.warn("metrics of step {} could not be written to {}: is the disk full?", step, config_.dump_folder);
  }
}

double measure_peak_flops(bool bf16, bool fp64) {
  const int64_t n = 1024;
  const auto dtype = bf16 ? at::kBFloat16 : fp64 ? at::kDouble : at::kFloat;
  const at::NoGradGuard no_grad;
  const at::Tensor a = at::ones({n, n}, dtype), b = at::ones({n, n}, dtype);
  at::Tensor c = at::mm(a, b);
  double best = 1e30, total = 0;
  while (total < 0.2) {
    const auto begin = std::chrono::steady_clock::now();
    at::mm_out(c, a, b);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    best = std::min(best, seconds);
    total += seconds;
  }
  return 2.0 * n * n * n / best;
}

}  // namespace titanium
