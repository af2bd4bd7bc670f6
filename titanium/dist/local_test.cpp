#include "titanium/dist/local.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <csignal>
#include <limits>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/conformance.h"
#include "titanium/dist/fork_ranks.h"
#include "titanium/dist/local_meet.h"
#include "titanium/dist/run_ranks.h"

namespace titanium {
namespace {

using std::chrono::milliseconds;

// A place of this test alone.
std::string a_place() {
  static int count = 0;
  return fmt::format("test:{}:{}", ::getpid(), ++count);
}

void run_processes(int size, const std::function<void(std::shared_ptr<World>)>& work, milliseconds timeout,
                   int killed = -1) {
  const std::string place = a_place();
  fork_ranks(
      size,
      [&](int rank, int ranks) {
        return local_world(meet_local(place, rank, ranks, std::chrono::seconds(60)), rank, timeout);
      },
      work, killed);
}

INSTANTIATE_TEST_SUITE_P(Local, Conformance,
                         ::testing::Values(Backend{.name = "threads", .run = run_ranks},
                                           Backend{.name = "processes",
                                                   .run = [](auto&&... args) { run_processes(args...); },
                                                   .most_ranks = 4}),
                         [](const auto& info) { return info.param.name; });

TEST(Local, RanksThatDoNotCallTheSameAreABug) {
  const auto calls = [](const std::shared_ptr<World>& world) {
    const Group all = world->all();
    if (world->rank() == 0) return all.all_reduce(at::ones({4}));
    all.barrier();
  };
  EXPECT_THROW(run_ranks(2, calls), Bug);
  const auto lengths = [](const std::shared_ptr<World>& world) {
    world->all().all_gather(at::ones({world->rank() == 0 ? 4 : 6}));
  };
  EXPECT_THROW(run_ranks(2, lengths), Bug);
  const auto dtypes = [](const std::shared_ptr<World>& world) {
    world->all().all_reduce(at::ones({4}, at::kByte));
  };
  EXPECT_THROW(run_ranks(2, dtypes), Bug);
}

TEST(Local, AWorldOfOneRunsToo) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    EXPECT_EQ(world->all().size(), 1);
    EXPECT_EQ(world->all().sum(3), 3);
  });
}

TEST(Local, NotANumberStaysOneInAMaximum) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    at::Tensor flat = at::full({2}, world->rank() + 1.0);
    flat[world->rank()] = std::numeric_limits<double>::quiet_NaN();
    world->all().all_reduce(flat, ReduceOp::kMax);
    EXPECT_TRUE(flat.isnan().all().item<bool>());
  });
}

TEST(Local, AProcessThatIsKilledIsNamedAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  try {
    run_processes(
        3,
        [](std::shared_ptr<World> world) {
          const Group all = world->all();
          all.barrier();
          world->progress(41, "backward");
          if (world->rank() == 1) ::raise(SIGKILL);
          for (int i = 0; i < 1000; ++i) all.all_reduce(at::ones({100}));
          ADD_FAILURE() << "sums without a rank";
        },
        std::chrono::seconds(60), 1);
    FAIL() << "no error";
  } catch (const RankLost& e) {
    EXPECT_STREQ(e.what(), "rank 1 ended (crashed, or was killed); its last progress: step 41, backward");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// What each of some threads gets from meet_local.
std::vector<std::string> meet(const std::vector<std::pair<int, int>>& ranks_and_sizes, milliseconds timeout) {
  const std::string place = a_place();
  std::vector<std::string> results(ranks_and_sizes.size());
  std::vector<std::jthread> threads;
  for (size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        const auto memory = meet_local(place, ranks_and_sizes[i].first, ranks_and_sizes[i].second, timeout);
        results[i] = fmt::format("{} ranks", memory->ranks());
      } catch (const Error& e) {
        results[i] = fmt::format("{}: {}", name(e.kind()), e.what());
      }
    });
  }
  threads.clear();
  return results;
}

TEST(LocalMeet, AllOrNone) {
  using Results = std::vector<std::string>;
  EXPECT_EQ(meet({{0, 3}, {1, 3}, {2, 3}}, std::chrono::seconds(20)),
            (Results{"3 ranks", "3 ranks", "3 ranks"}));
  EXPECT_EQ(meet({{0, 3}, {2, 3}}, milliseconds(300)),
            Results(2, "RankLost: rank 1 did not come within 0.3 s (comm.init_timeout_seconds)"));
  EXPECT_EQ(meet({{0, 2}, {1, 4}}, std::chrono::seconds(20)),
            Results(2, "BadConfig: rank 1 says that there are 4 ranks, rank 0 that there are 2"));
  EXPECT_EQ(meet({{0, 3}, {1, 3}, {1, 3}}, std::chrono::seconds(20)),
            Results(3, "BadConfig: two processes say that they are rank 1"));
}

TEST(LocalMeet, WithoutRankZeroTheOthersEnd) {
  const std::string got = meet({{1, 2}}, milliseconds(200)).front();
  EXPECT_NE(got.find("RankLost: rank 0 did not come to test:"), got.npos) << got;
}

TEST(LocalMeet, APlaceIsTakenOnce) {
  const std::string place = a_place();
  std::jthread first([&] { EXPECT_THROW(meet_local(place, 0, 2, milliseconds(1000)), RankLost); });
  std::this_thread::sleep_for(milliseconds(200));
  EXPECT_THROW(meet_local(place, 0, 2, milliseconds(1000)), BadConfig);
}

TEST(LocalMeet, ARankThatEndsBeforeAllCameIsNamed) {
  const std::string place = a_place();
  try {
    fork_ranks(
        3,
        [&](int rank, int size) -> std::shared_ptr<World> {
          if (rank == 2) {  // has not come when rank 1 ends
            std::this_thread::sleep_for(milliseconds(1500));
            throw RankLost("rank 2 is late");
          }
          std::jthread end;
          if (rank == 1) {
            end = std::jthread([] {
              std::this_thread::sleep_for(milliseconds(500));
              ::_exit(0);
            });
          }
          return local_world(meet_local(place, rank, size, std::chrono::seconds(20)), rank,
                             milliseconds(1000));
        },
        [](std::shared_ptr<World>) {});
    FAIL() << "no error";
  } catch (const RankLost& e) {
    EXPECT_STREQ(e.what(), "rank 1 ended while the ranks met");
  }
}

// A stage of a pipeline may compute for longer than the timeout before it comes, action by action.
TEST(Local, ARankThatGoesOnIsWaitedFor) {
  const auto late = [](bool tells) {
    return [tells](std::shared_ptr<World> world) {
      for (int i = 0; world->rank() == 1 && i < 8; ++i) {
        std::this_thread::sleep_for(milliseconds(250));
        if (tells) world->progress(i, "forward");
      }
      world->all().barrier();
    };
  };
  run_processes(2, late(true), milliseconds(1000));
  EXPECT_THROW(run_processes(2, late(false), milliseconds(1000)), std::exception);
}

}  // namespace
}  // namespace titanium
