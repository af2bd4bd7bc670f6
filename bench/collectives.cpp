// Collectives of 32 MB of fp32 (all_reduce also of 16 MB of bf16) between two processes of one host, over
// each transport.
//   bench_collectives [REPEATS]    seconds a call, medians, as JSON
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "bench/timing.h"
#include "titanium/base/error.h"
#include "titanium/dist/gloo.h"
#include "titanium/dist/local.h"
#include "titanium/dist/local_memory.h"
#include "titanium/dist/rendezvous.h"

namespace titanium {
namespace {

constexpr int64_t kNumbers = 8 << 20;

void measure(World& world, const std::string& name, int repeats, std::map<std::string, double>& results) {
  at::set_num_threads(1);
  const Group all = world.all();
  const at::Tensor flat = at::zeros({kNumbers});  // stays: sums do not grow
  const std::map<std::string, std::function<void()>> calls = {
      {"all_reduce", [&] { all.all_reduce(flat); }},
      {"all_gather", [&] { all.all_gather(flat); }},
      {"reduce_scatter", [&] { all.reduce_scatter(flat); }},
      {"all_reduce_bf16", [half = flat.to(at::kBFloat16), &all] { all.all_reduce(half); }},
      {"barrier", [&] { all.barrier(); }},
  };
  for (const auto& [call, work] : calls) {
    work();
    std::vector<double> times;
    for (int i = 0; i < repeats; ++i) {
      all.barrier();
      times.push_back(seconds(work));
    }
    results[name + "_" + call] = median(times);
  }
}

void run(int repeats) {
  constexpr int kSize = 2;
  const int socket = listen_at(0);
  const int port = port_of(socket);
  close(socket);
  const std::shared_ptr<LocalMemory> memory = LocalMemory::create(kSize);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < kSize; ++rank) {
    ranks.push_back(fork());
    if (ranks.back() != 0) continue;
    int code = 0;
    std::map<std::string, double> results;
    try {
      measure(*local_world(LocalMemory::open(dup(memory->fd())), rank, std::chrono::seconds(100)), "local",
              repeats, results);
      measure(*gloo_world({}, rank, kSize, "127.0.0.1", port), "gloo", repeats, results);
    } catch (const std::exception& e) {
      fmt::print(stderr, "bench_collectives: {}\n", e.what());
      code = 1;
    }
    if (rank == 0) fmt::print("{}\n", nlohmann::json(results).dump());
    std::fflush(stdout);
    _exit(code);
  }
  for (pid_t rank : ranks) {
    int status = 0;
    waitpid(rank, &status, 0);
    if (status != 0) std::exit(1);
  }
}

}  // namespace
}  // namespace titanium

int main(int argc, char** argv) {
  titanium::run(argc > 1 ? std::atoi(argv[1]) : 15);
}
