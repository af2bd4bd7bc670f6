#include "titanium/dist/gloo.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <mutex>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/conformance.h"
#include "titanium/dist/rendezvous.h"

namespace titanium {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

int free_port() {
  const int socket = listen_at(0);
  const int port = port_of(socket);
  close(socket);
  return port;
}

// Ranks as threads, each with its own connections.  Throws the first cause.
void run_gloo(int size, const std::function<void(std::shared_ptr<World>)>& work, milliseconds timeout) {
  const int port = free_port();
  const CommConfig comm = {.init_timeout_seconds = 20,
                           .train_timeout_seconds = std::chrono::duration_cast<seconds>(timeout).count()};
  std::mutex mutex;
  std::exception_ptr cause, lost;
  std::vector<std::thread> ranks;
  const int threads = at::get_num_threads();
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      at::set_num_threads(1);
      std::shared_ptr<World> world;
      const auto caught = [&](std::exception_ptr& kind, const std::string& reason) {
        {
          const std::lock_guard lock(mutex);
          if (!kind) kind = std::current_exception();
        }
        if (world) world->fail(reason);
      };
      try {
        world = gloo_world(comm, rank, size, "127.0.0.1", port);
        work(world);
      } catch (const RankLost& e) {
        caught(lost, e.what());
      } catch (const std::exception& e) {
        caught(cause, e.what());
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  at::set_num_threads(threads);
  if (cause) std::rethrow_exception(cause);
  if (lost) std::rethrow_exception(lost);
}

INSTANTIATE_TEST_SUITE_P(Gloo, Conformance,
                         ::testing::Values(Backend{.name = "threads", .run = run_gloo, .most_ranks = 4}),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace titanium
