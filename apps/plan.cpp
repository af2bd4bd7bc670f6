#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>

#include <ATen/Parallel.h>

#include "apps/commands.h"
#include "apps/on_ranks.h"
#include "titanium/base/error.h"
#include "titanium/dist/launch.h"
#include "titanium/dist/planned_world.h"
#include "titanium/report/format.h"
#include "titanium/schedule/pipeline.h"
#include "titanium/schedule/print.h"
#include "titanium/train/calibrate.h"
#include "titanium/train/timeline_page.h"
#include "titanium/train/trainer.h"

namespace titanium {
namespace {

constexpr int32_t kMostMicroBatches = 10000;

struct Flags {
  std::string file, simulate, calibrate, html, trace;
  int32_t micro_batches = 0;
  int world_size = 1, rank = 0;
  bool quiet = false;
};

// Refuses a file that could not be written in the end, before any work.
void check_output(const char* flag, const std::string& file, const std::vector<std::string>& others) {
  namespace fs = std::filesystem;
  if (file.empty()) return;
  std::error_code error;
  const fs::path path(file);
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status) && !fs::is_regular_file(status))
    throw BadConfig("{} {}: is there and is not a regular file; allowed: a file to write", flag, file);
  if (fs::exists(status) && ::access(file.c_str(), W_OK) != 0)
    throw BadConfig("{} {}: cannot be written: {}", flag, file, std::strerror(errno));
  if (!fs::is_directory(folder, error))
    throw BadConfig("{} {}: there is no folder {}", flag, file, folder.string());
  if (::access(folder.c_str(), W_OK | X_OK) != 0)
    throw BadConfig("{} {}: the folder {}: {}", flag, file, folder.string(), std::strerror(errno));
  for (const std::string& other : others) {
    if (!other.empty() && fs::weakly_canonical(path, error) == fs::weakly_canonical(other, error))
      throw BadConfig("{} {}: is also given as another file of this command", flag, file);
  }
}

std::string place(const ParallelDims& dims, int rank) {
  const Coordinates at = coordinates_of(dims, rank);
  return fmt::format("rank {} of {} (pp {}, dp_replicate {}, dp_shard {}, tp {})", rank, dims.world_size,
                     at.pp, at.dp_replicate, at.dp_shard, at.tp);
}

// The rank of another pipeline coordinate.
int at_stage(const ParallelDims& dims, int rank, size_t pp) {
  Coordinates at = coordinates_of(dims, rank);
  at.pp = static_cast<int>(pp);
  return rank_of(dims, at);
}

void tell_pipeline(const TrainStep& step, const StepShape& shape) {
  if (!step.options().pipeline) return;
  const auto ranks = static_cast<int32_t>(step.parts().size());
  const PipelineOrder order = step.options().pipeline->order(ranks, shape.micro_batches);
  fmt::print(
      "# pipeline: {}\n# bubble {:.1f} % where a stage's forward, input and weight gradients take as long\n",
      step.options().pipeline->text(step.model().block_count()), 100 * time_pipeline(order).bubble());
}

void tell_simulation(const Timeline& timeline, const StepEstimate& estimate, const StepShape& shape,
                     const ParallelDims& dims, const Flags& flags) {
  const double tokens =
      static_cast<double>(shape.tokens) * shape.micro_batches * dims.dp_replicate * dims.dp_shard;
  fmt::print("# simulated: {:.6g} s a step, {} tok/s, {:.1f} % of the ranks' time idle\n", timeline.seconds,
             human_number(tokens / timeline.seconds), 100 * timeline.bubble());
  if (flags.quiet) return;
  const auto pp = static_cast<size_t>(coordinates_of(dims, flags.rank).pp);
  fmt::print("#    start s      end s  action of rank {}\n", flags.rank);
  for (const TimedAction& timed : timeline.ranks[pp].actions) {
    fmt::print("{:12.6f} {:10.6f}  {}{}\n", timed.start, timed.end,
               timed.action < 0 ? "norm, clip and update" : to_string(estimate.plans[pp][timed.action]),
               timed.transfer ? "  (transfer)" : "");
  }
}

void draw(const Session& session, const StepEstimate& estimate, const Timeline& timeline,
          const Flags& flags) {
  const ParallelDims& dims = session.store->mesh().dims();
  TimelinePage page;
  page.title = fmt::format("{} {} on {} ranks: {}", session.spec.name.name, session.spec.name.flavor,
                           dims.world_size, flags.file);
  for (size_t pp = 0; pp < estimate.ranks.size(); ++pp)
    page.ranks.push_back(fmt::format("pp {} (rank {})", pp, at_stage(dims, flags.rank, pp)));
  if (!flags.html.empty()) write_file(flags.html, timeline_html(page, estimate, timeline));
  if (!flags.trace.empty()) write_file(flags.trace, timeline_trace(page, estimate, timeline));
}

int run_plan(const Flags& flags, const std::vector<std::string>& overrides) {
  if (std::getenv(kLauncherVariable)) {
    throw BadConfig(
        "plan: under `titanium launch` it measures (--calibrate); to plan for N ranks give --world-size N");
  }
  if (flags.simulate.empty() && !(flags.html.empty() && flags.trace.empty()))
    throw BadConfig("--html and --trace show a simulated step: give --simulate hardware.toml too");
  check_output("--html", flags.html, {flags.file, flags.simulate, flags.trace});
  check_output("--trace", flags.trace, {flags.file, flags.simulate});
  const TrainConfig config = load_train_config(flags.file, overrides);
  check_model(config);
  std::optional<Hardware> hardware;
  if (!flags.simulate.empty()) hardware = Hardware::load(flags.simulate);
  LogOptions options;
  options.level = LogLevel::kWarning;
  Log log(options);
  Session session = open_session(config.model.path, config, log, /*load_weights=*/false,
                                 planned_world(flags.rank, flags.world_size));
  const auto optimizer = make_optimizer(*session.store, optimizer_options(config.optimizer));
  const ParallelDims& dims = session.store->mesh().dims();
  StepShape shape = step_shape(config.training, dims);
  if (flags.micro_batches > 0) shape.micro_batches = flags.micro_batches;
  if (shape.micro_batches > kMostMicroBatches) {
    throw BadConfig(
        "training.global_batch_size = {}, training.global_batch_tokens = {}: more than {} micro-batches of "
        "{} tokens a data rank; a plan of fewer: --micro-batches N",
        config.training.global_batch_size, config.training.global_batch_tokens, kMostMicroBatches,
        shape.tokens);
  }
  const StepEstimate estimate = estimate_step(*session.step, *optimizer, shape);
  const auto pp = static_cast<size_t>(coordinates_of(dims, flags.rank).pp);

  fmt::print("# {} {}: {} parameters, {} blocks, {} units; {} micro-batch{} of up to {} tokens a data rank\n",
             session.spec.name.name, session.spec.name.flavor,
             human_number(static_cast<double>(session.store->parameters())), session.model->block_count(),
             session.store->places().size(), shape.micro_batches, shape.micro_batches == 1 ? "" : "es",
             shape.tokens);
  fmt::print("# {}\n", place(dims, flags.rank));
  tell_pipeline(*session.step, shape);
  fmt::print("# memory: {}\n", estimate.ranks[pp].memory.text());
  const auto fullest =
      std::max_element(estimate.ranks.begin(), estimate.ranks.end(),
                       [](const auto& a, const auto& b) { return a.memory.total() < b.memory.total(); });
  if (estimate.ranks.size() > 1) {
    fmt::print("# memory of the fullest stage, {}: {}\n",
               place(dims, at_stage(dims, flags.rank, fullest - estimate.ranks.begin())),
               fullest->memory.text());
  }
  if (dims.world_size > 1) fmt::print("# bytes into the rank a step: {}\n", estimate.ranks[pp].bytes.text());
  if (hardware && hardware->capacity > 0 &&
      static_cast<double>(fullest->memory.total()) > hardware->capacity) {
    fmt::print("# does not fit: [memory] capacity is {}\n",
               human_bytes(static_cast<uint64_t>(hardware->capacity)));
  }
  if (hardware) {
    const Timeline timeline = simulate(estimate.plans, estimate.tasks,
                                       estimate_costs(*session.step, *optimizer, estimate, shape, *hardware));
    draw(session, estimate, timeline, flags);
    tell_simulation(timeline, estimate, shape, dims, flags);
  } else if (!flags.quiet) {
    std::cout << print_plan(estimate.plans[pp]) << std::endl;
  }
  return 0;
}

int run_calibration(const Flags& flags, const std::vector<std::string>& overrides) {
  check_output("--calibrate", flags.calibrate, {flags.file});
  const TrainConfig config = load_train_config(flags.file, overrides);
  check_model(config);
  return on_ranks(config.comm, [&](const std::shared_ptr<World>& world) {
    Log log(log_of(*world, LogLevel::kWarning));
    const Hardware hardware = calibrate(config, step_shape(config.training, {.dp_shard = 1}), *world, log);
    if (world->rank() > 0) return 0;
    write_file(
        flags.calibrate,
        hardware.toml(fmt::format(
            "# Measured by `titanium plan --calibrate` on {} rank(s) of {} thread(s): rates of one rank.\n",
            world->size(), at::get_num_threads())));
    fmt::print("{}: {:.1f} GFLOP/s forward, {:.1f} backward, attention {:.1f} and {:.1f}, head {:.1f}\n",
               flags.calibrate, hardware.matmul / 1e9, hardware.matmul_backward / 1e9,
               hardware.attention / 1e9, hardware.attention_backward / 1e9, hardware.head / 1e9);
    return 0;
  });
}

}  // namespace

void add_plan(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand(
      "plan", "print what a step of a run does on any cluster, what it holds and how long it takes");
  command->add_option("run.toml", flags->file, "the run; of the model only config.json is read")->required();
  CLI::Option* calibrate =
      command
          ->add_option("--calibrate", flags->calibrate,
                       "measure this machine's rates into that file instead; under `titanium launch` with as "
                       "many ranks as will run")
          ->check(not_empty());
  const std::vector<CLI::Option*> of_plans = {
      command->add_option("--world-size", flags->world_size, "ranks of the run; none of them is started")
          ->check(CLI::Range(1, 1 << 20))
          ->capture_default_str(),
      command->add_option("--rank", flags->rank, "the rank whose plan is shown")
          ->check(CLI::Range(0, (1 << 20) - 1))
          ->capture_default_str(),
      command
          ->add_option("--micro-batches", flags->micro_batches,
                       "micro-batches of a data rank; else those of the config")
          ->check(CLI::Range(1, kMostMicroBatches)),
      command
          ->add_option("--simulate", flags->simulate,
                       "a machine's rates (hardware.toml): show when every action runs")
          ->check(not_empty()),
      command->add_option("--html", flags->html, "draw the simulated step of all stages into that page")
          ->check(not_empty()),
      command->add_option("--trace", flags->trace, "write it for Perfetto")->check(not_empty()),
      command->add_flag("--quiet", flags->quiet, "without the list of actions")};
  for (CLI::Option* option : of_plans) calibrate->excludes(option);
  command->allow_extras();
  command->footer("--section.key=value sets a key, after the file.");
  command->callback([flags, command, &run] {
    run = [flags, command] {
      return flags->calibrate.empty() ? run_plan(*flags, command->remaining())
                                      : run_calibration(*flags, command->remaining());
    };
  });
}

}  // namespace titanium
