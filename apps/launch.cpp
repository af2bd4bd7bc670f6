#include "titanium/dist/launch.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "apps/commands.h"
#include "titanium/base/error.h"
#include "titanium/dist/local_memory.h"

namespace titanium {
namespace {

std::string this_program() {
  char path[PATH_MAX];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  if (size <= 0 || size >= static_cast<ssize_t>(sizeof path)) throw Bug("/proc/self/exe cannot be read");
  return {path, static_cast<size_t>(size)};
}

// The others work as one process.
constexpr const char* kForRanks[] = {"train", "check", "score", "generate", "plan"};

int run_launch(int ranks, std::vector<std::string> words) {
  const std::string known = fmt::format("{}", fmt::join(kForRanks, ", "));
  if (words.empty()) throw BadConfig("launch: which command? One of {}", known);
  if (std::find(std::begin(kForRanks), std::end(kForRanks), words.front()) == std::end(kForRanks)) {
    throw BadConfig("launch: '{}' does not run on several ranks; those that do: {}", words.front(), known);
  }
  words.insert(words.begin(), this_program());
  return launch_ranks(ranks, words);
}

}  // namespace

void add_launch(CLI::App& app, Run& run) {
  auto ranks = std::make_shared<int>(0);
  CLI::App* command = app.add_subcommand("launch", "run a command on ranks of this host");
  command->add_option("-n,--ranks", *ranks, "number of ranks, each a process")
      ->required()
      ->check(CLI::Range(1, kMaxLocalRanks));
  command->prefix_command();
  command->footer("titanium launch -n 2 train run.toml --parallelism.data_parallel_shard_degree=2");
  command->callback([ranks, command, &run] {
    run = [ranks, command] { return run_launch(*ranks, command->remaining()); };
  });
}

}  // namespace titanium
