#include "titanium/dist/gloo.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <future>
#include <thread>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/dist/conformance.h"
#include "titanium/dist/fork_ranks.h"
#include "titanium/dist/open_world.h"
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

void run_processes(int size, const std::function<void(std::shared_ptr<World>)>& work, milliseconds timeout) {
  const int port = free_port();
  CommConfig comm;
  comm.init_timeout_seconds = 20;
  comm.train_timeout_seconds = std::chrono::duration_cast<seconds>(timeout).count();
  fork_ranks(
      size, [&](int rank, int ranks) { return gloo_world(comm, rank, ranks, "127.0.0.1", port); }, work);
}

INSTANTIATE_TEST_SUITE_P(Gloo, Conformance,
                         ::testing::Values(Backend{.name = "processes",
                                                   .run = [](auto&&... args) { run_processes(args...); },
                                                   .most_ranks = 4}),
                         [](const auto& info) { return info.param.name; });

// Three in a row: rank 0 waits for rank 1, which waits for rank 2, which computes for longer than the
// timeout.
TEST(GlooWorld, ARankThatGoesOnIsWaitedFor) {
  constexpr milliseconds kTimeout{3000};
  const auto late = [](bool met, bool tells) {
    return [met, tells](std::shared_ptr<World> world) {
      if (met) {
        world->group({0, 1, 2}).barrier();
        if (world->rank() != 2) world->group({0, 1}).barrier();
        if (world->rank() != 0) world->group({1, 2}).barrier();
      }
      world->progress(0, "forward");
      for (int i = 0; world->rank() == 2 && i < 28; ++i) {
        std::this_thread::sleep_for(milliseconds(250));
        if (tells) world->progress(i, "forward");
      }
      if (world->rank() != 0) world->group({1, 2}).barrier();
      if (world->rank() != 2) world->group({0, 1}).barrier();
    };
  };
  run_processes(3, late(false, true), kTimeout);  // also where the groups are still to be made
  run_processes(3, late(true, true), kTimeout);
  try {
    run_processes(3, late(true, false), kTimeout);
    FAIL() << "no error";
  } catch (const RankLost& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("rank 2 did not come within 3 s (comm.train_timeout_seconds)"), text.npos) << text;
  }
}

// Rank 0 waits for rank 1, which goes on for long and then waits for rank 2.  Of rank 2 rank 0 knows nothing
// then, and nothing is no verdict.
TEST(GlooWorld, WhoIsSeenForTheFirstTimeIsWaitedFor) {
  run_processes(
      3,
      [](std::shared_ptr<World> world) {
        world->group({0, 1, 2}).barrier();
        world->progress(0, "forward");
        if (world->rank() == 1) {
          for (int i = 0; i < 25; ++i) {  // longer than the timeout
            std::this_thread::sleep_for(milliseconds(250));
            world->progress(i, "forward");
          }
        }
        if (world->rank() == 2) std::this_thread::sleep_for(milliseconds(8300));
        if (world->rank() != 0) world->group({1, 2}).barrier();
        if (world->rank() != 2) world->group({0, 1}).barrier();
      },
      milliseconds(6000));
}

TEST(GlooWorld, TwoThreadsMakeGroupsInAnyOrder) {
  run_processes(
      2,
      [](std::shared_ptr<World> world) {
        const auto work = [&](bool waits, const std::string& purpose) {
          if (waits) std::this_thread::sleep_for(milliseconds(300));
          return world->all(purpose).sum(1);
        };
        auto other = std::async(std::launch::async, work, world->rank() == 0, "save");
        EXPECT_EQ(work(world->rank() == 1, ""), 2);
        EXPECT_EQ(other.get(), 2);
      },
      milliseconds(5000));
}

// Ranks that may be on several hosts, here threads of this process.
TEST(GlooWorld, IsWhatOpenWorldTakes) {
  LaunchEnv env;
  env.size = 2;
  env.local_size = 1;
  env.master_addr = "127.0.0.1";
  env.addr_given = env.port_given = true;
  env.master_port = free_port();
  std::vector<std::future<double>> sums;
  for (env.rank = 0; env.rank < 2; ++env.rank) {
    sums.push_back(
        std::async(std::launch::async, [env] { return open_world({}, env)->all().sum(env.rank + 1); }));
  }
  for (std::future<double>& sum : sums) EXPECT_EQ(sum.get(), 3);

  env.rank = 0;
  env.addr_given = false;
  EXPECT_THROW(open_world({}, env), BadConfig);  // which host?
}

}  // namespace
}  // namespace titanium
