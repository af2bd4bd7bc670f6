// What the tests of launch run: ranks that do collectives until one of them comes to grief.
//   ranks_program launch N [what [rank]]   starts N ranks of `ranks_program what rank`
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/dist/launch.h"
#include "titanium/dist/open_world.h"

namespace titanium {
namespace {

int to_int(std::string_view text) {
  int value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

void come_to_grief(const std::string& what) {
  if (what == "throw") throw BadData("no such file: data.jsonl");
  if (what == "exit") ::_exit(7);
  if (what == "abort") std::abort();
  if (what == "kill") ::raise(SIGKILL);
  if (what == "stop") ::raise(SIGSTOP);
  if (what == "sleep") std::this_thread::sleep_for(std::chrono::hours(1));
}

void print(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

int run_rank(const std::string& what, int who) {
  if (what == "lines") {  // long ones, in pieces, at once from all
    const std::string_view rank = std::getenv("RANK");
    for (int i = 0; i < 200; ++i) {
      fmt::print("{}", std::string(3000, rank[0]));
      std::fflush(stdout);
      fmt::print("{}\n", i);
    }
    fmt::print("no end");
    return 0;
  }
  if (what == "flood") {  // without an end, faster than it is passed on
    print(fmt::format("pid {}", ::getpid()));
    const std::string much(1 << 20, '\n');
    while (true) fmt::print("{}", much);
  }
  if (what == "env") {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}) {
      print(fmt::format("{}={}", name, std::getenv(name)));
    }
    return 0;
  }
  if (what == "stubborn") {  // stops when it shall end
    std::signal(SIGTERM, [](int) {
      while (true) ::raise(SIGSTOP);
    });
    print(fmt::format("pid {}", ::getpid()));
    while (true) ::pause();
  }
  if (what == "obey") {  // a good end on a signal, at different moments
    static volatile std::sig_atomic_t caught = 0;
    std::signal(SIGTERM, [](int signal) { caught = signal; });
    print(fmt::format("pid {}", ::getpid()));
    while (caught == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(200 * to_int(std::getenv("RANK"))));
    print("saved");
    return 128 + caught;
  }
  const LaunchEnv env = read_launch_env();
  if (what == "never" && env.rank == who) std::this_thread::sleep_for(std::chrono::hours(1));
  const std::shared_ptr<World> world =
      open_world({.init_timeout_seconds = what == "never" ? 1 : 60, .train_timeout_seconds = 2}, env);
  try {
    const Group all = world->all();
    world->progress(1, "start");
    print(fmt::format("pid {} sum {}", ::getpid(), all.sum(world->rank())));
    for (int64_t step = 2; what != "none" || step < 20; ++step) {
      world->progress(step, "forward");
      at::Tensor flat = at::ones({100'000});
      all.all_reduce(flat);
      if (step == 10 && world->rank() == who) come_to_grief(what);
      if (what == "forever") std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return 0;
  } catch (const std::exception& e) {
    world->fail(e.what());
    throw;
  }
}

}  // namespace
}  // namespace titanium

int main(int argc, char** argv) {
  using namespace titanium;
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() > 1 && words[0] == "launch") {
      std::vector<std::string> command = {"/proc/self/exe"};
      command.insert(command.end(), words.begin() + 2, words.end());
      return launch_ranks(to_int(words[1]), command);
    }
    return run_rank(words.empty() ? "none" : words[0], words.size() > 1 ? to_int(words[1]) : -1);
  } catch (const Error& e) {
    fmt::print(stderr, "{}: {}\n", name(e.kind()), e.what());
    return exit_code(e.kind());
  }
}
