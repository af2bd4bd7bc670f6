#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <iostream>
#include <string>
#include <string_view>

#include "apps/commands.h"
#include "apps/on_ranks.h"
#include "titanium/base/error.h"
#include "titanium/train/trainer.h"

namespace titanium {
namespace {

// The only variables of ours that the signal handler may touch.
std::atomic<bool> stop_asked = false;
std::atomic<int> first_signal = 0;

void ask_to_stop(int signal) {
  int none = 0;
  first_signal.compare_exchange_strong(none, signal);
  stop_asked = true;
  if (signal == SIGHUP) return;  // a terminal that closes may say so twice, and nobody reads there
  std::signal(signal, SIG_DFL);
  constexpr std::string_view kText =
      "titanium: finishing this step, then the run stops; the same signal again ends it at once\n";
  const int before = errno;
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, kText.data(), kText.size());
  errno = before;
}

void listen_to_signals() {
  std::signal(SIGINT, ask_to_stop);
  std::signal(SIGTERM, ask_to_stop);
  // A terminal that closes; under nohup that is to be ignored.
  if (std::signal(SIGHUP, ask_to_stop) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
}

struct Flags {
  std::string file;
  bool print_config = false, help_config = false;
};

// Of a run that a signal stopped: what a shell says of a program that the signal ended, so that a script does
// not take it for a complete run.  The signal may have come to another rank.
int stopped_status(World& world) {
  for (const std::string& signal : world.all().exchange(std::to_string(first_signal)))
    if (signal != "0") return 128 + std::stoi(signal);
  return 128 + SIGTERM;
}

int train(const TrainConfig& config, const std::shared_ptr<World>& world) {
  Log log(log_of(*world));
  Trainer trainer(config, log, world);
  listen_to_signals();  // until here there is nothing to save, and a signal ends the process
  const Trainer::Outcome outcome = trainer.run(stop_asked);
  if (outcome.interrupted && !outcome.saved) {
    log.info("stopped after {} updates; they are not saved (checkpoint.enable = false)", outcome.step);
  } else if (outcome.interrupted) {
    log.info("stopped after {} updates and saved; the same command goes on from there", outcome.step);
  } else if (outcome.validation_before && outcome.validation_after) {
    log.info("validation loss {:.4f} after {} updates, {:.4f} after {} ({:+.1f} %)",
             *outcome.validation_before, outcome.start, *outcome.validation_after, outcome.step,
             100 * (*outcome.validation_after / *outcome.validation_before - 1));
  }
  return outcome.interrupted ? stopped_status(*world) : 0;
}

int run_train(const Flags& flags, const std::vector<std::string>& overrides) {
  if (flags.help_config) {
    std::cout << config_help();
    return 0;
  }
  for (const std::string& argument : overrides) {
    if (argument.find('=') == std::string::npos)
      throw BadConfig("{}: a key is given as --section.key=value, in one word", argument);
  }
  const std::optional<std::filesystem::path> file =
      flags.file.empty() ? std::nullopt : std::optional<std::filesystem::path>(flags.file);
  const TrainConfig config = load_train_config(file, overrides);
  if (flags.print_config) {
    std::cout << print_train_config(config);
    return 0;
  }
  check_complete(config);
  std::signal(SIGPIPE, SIG_IGN);  // a reader of the log that is gone is no reason to stop
  std::signal(SIGXFSZ, SIG_IGN);  // nor is a file that may not grow (ulimit -f): its write says so
  return on_ranks(config.comm, [&](const std::shared_ptr<World>& world) { return train(config, world); });
}

}  // namespace

void add_train(CLI::App& app, Run& run) {
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("train", "train a model as a TOML file says");
  command->add_option("run.toml", flags->file,
                      "the run; every key has a default but model.path and data.path");
  command->add_flag("--print-config", flags->print_config,
                    "print every key with its value, as TOML, and stop");
  command->add_flag("--help-config", flags->help_config, "print what every key means, and stop");
  command->allow_extras();
  command->footer(
      "--section.key=value sets a key, after the file.  `titanium train --help-config` lists all keys.");
  command->callback(
      [flags, command, &run] { run = [flags, command] { return run_train(*flags, command->remaining()); }; });
}

}  // namespace titanium
