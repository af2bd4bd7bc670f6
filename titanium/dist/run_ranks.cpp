#include "titanium/dist/run_ranks.h"

#include <ATen/Parallel.h>

#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/dist/local.h"

namespace titanium {

void run_ranks(int size, const std::function<void(std::shared_ptr<World>)>& work,
               std::chrono::milliseconds timeout) {
  std::mutex mutex;
  std::exception_ptr cause, lost;
  const auto caught = [&](World& world, std::exception_ptr& kind, const std::string& reason) {
    {
      const std::lock_guard lock(mutex);
      if (!kind) kind = std::current_exception();
    }
    world.fail(reason);
  };
  const auto run = [&](std::shared_ptr<World> world) {
    at::set_num_threads(1);
    try {
      work(world);
    } catch (const RankLost& e) {
      caught(*world, lost, e.what());
    } catch (const std::exception& e) {
      caught(*world, cause, e.what());
    } catch (...) {
      caught(*world, cause, "an exception of an unknown kind");
    }
  };

  const int threads = at::get_num_threads();
  std::vector<std::shared_ptr<World>> worlds = local_worlds(size, timeout);
  std::vector<std::thread> ranks;
  ranks.reserve(worlds.size());
  // A rank's world ends with its thread: who still waits for it is told.
  for (std::shared_ptr<World>& world : worlds) {
    try {
      ranks.emplace_back(run, world);
    } catch (const std::system_error& e) {  // no more threads
      caught(*world, cause, e.what());
      break;
    }
    world = nullptr;
  }
  for (std::thread& rank : ranks) rank.join();
  at::set_num_threads(threads);
  if (cause) std::rethrow_exception(cause);
  if (lost) std::rethrow_exception(lost);
}

}  // namespace titanium
