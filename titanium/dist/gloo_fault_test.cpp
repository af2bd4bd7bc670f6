// Ranks as processes that are killed, stopped, or throw; and meetings that cannot be.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/gloo.h"
#include "titanium/dist/rendezvous.h"

namespace titanium {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

int free_port() {
  const int socket = listen_at(0);
  const int port = port_of(socket);
  close(socket);
  return port;
}

enum class Fault { kKilled, kStopped, kThrows };
enum class Point { kStart, kMet, kCollective, kEnd };

struct Case {
  Fault fault;
  Point at;
  int victim;
  int size = 2;
};

std::string name_of(const Case& one) {
  constexpr std::array kFaults = {"killed", "stopped", "throws"};
  constexpr std::array kPoints = {"at the start", "when all have met", "before a collective", "at the end"};
  return fmt::format("rank {} of {} {} {}", one.victim, one.size, kFaults[static_cast<int>(one.fault)],
                     kPoints[static_cast<int>(one.at)]);
}

constexpr CommConfig kComm = {.init_timeout_seconds = 3, .train_timeout_seconds = 2};

// What each rank does, with the fault on its way.
void rank_of(const Case& one, int rank, int port) {
  const auto point = [&](Point here) {
    if (rank != one.victim || here != one.at) return;
    if (one.fault == Fault::kKilled) raise(SIGKILL);
    if (one.fault == Fault::kStopped) raise(SIGSTOP);
    throw BadData("the file is gone");
  };
  point(Point::kStart);
  const std::shared_ptr<World> world = gloo_world(kComm, rank, one.size, "127.0.0.1", port);
  try {
    point(Point::kMet);
    const Group all = world->all();
    for (int step = 0; step < 20; ++step) {
      world->progress(step, "forward");
      if (step == 10) point(Point::kCollective);
      const at::Tensor flat = at::ones({1000});
      all.all_reduce(flat);
      if (flat[999].item<float>() != static_cast<float>(one.size)) throw Bug("a wrong sum");
      std::this_thread::sleep_for(milliseconds(20));
    }
    point(Point::kEnd);
    if (one.at == Point::kEnd && rank == one.victim) return;
    if (one.at == Point::kEnd) all.barrier();
  } catch (const std::exception& e) {
    world->fail(e.what());
    throw;
  }
}

struct Process {
  pid_t pid;
  int pipe;
  bool ended = false;
  int status = 0;
  double took = 0;
  std::string message = "";
};

Process start_process(const std::function<void()>& work) {
  int ends[2];
  if (pipe(ends) != 0) throw Bug("no pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    int code = 0;
    std::string message;
    try {
      work();
    } catch (const Error& e) {
      code = exit_code(e.kind());
      message = e.what();
    } catch (const std::exception& e) {
      code = 1;
      message = e.what();
    }
    if (write(ends[1], message.data(), message.size()) < 0) code = 99;
    _exit(code);
  }
  close(ends[1]);
  return {.pid = pid, .pipe = ends[0]};
}

// Until all have ended but those that are stopped, or the time is over; then none is left.
void finish(std::vector<std::vector<Process>>& groups, seconds within) {
  const Clock::time_point start = Clock::now();
  for (bool left = true; left && Clock::now() - start < within;) {
    left = false;
    for (std::vector<Process>& group : groups) {
      for (Process& one : group) {
        if (one.ended) continue;
        if (waitpid(one.pid, &one.status, WNOHANG | WUNTRACED) == one.pid) {
          one.ended = true;
          one.took = std::chrono::duration<double>(Clock::now() - start).count();
        } else {
          left = true;
        }
      }
    }
    std::this_thread::sleep_for(milliseconds(10));
  }
  for (std::vector<Process>& group : groups) {
    for (Process& one : group) {
      if (!one.ended || WIFSTOPPED(one.status)) {
        kill(one.pid, SIGKILL);
        int status = 0;
        waitpid(one.pid, &status, 0);
      }
      std::array<char, 4096> text;
      for (ssize_t n = 0; (n = read(one.pipe, text.data(), text.size())) > 0;)
        one.message.append(text.data(), n);
      close(one.pipe);
    }
  }
}

// Cases run side by side.
void run_cases(const std::vector<Case>& cases) {
  std::vector<std::vector<Process>> groups;
  for (const Case& one : cases) {
    const int port = free_port();
    std::vector<Process>& group = groups.emplace_back();
    for (int rank = 0; rank < one.size; ++rank) {
      group.push_back(start_process([&] { rank_of(one, rank, port); }));
    }
  }
  finish(groups, seconds(30));
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& fault = cases[i];
    for (int rank = 0; rank < fault.size; ++rank) {
      const Process& one = groups[i][rank];
      const std::string what = fmt::format("{}: rank {} after {:.1f} s, status {}: '{}'", name_of(fault),
                                           rank, one.took, one.status, one.message);
      SCOPED_TRACE(what);
      EXPECT_TRUE(one.ended);
      EXPECT_LT(one.took, 12);  // the timeouts, and what loaded processors and name servers add
      if (!one.ended || rank == fault.victim) continue;
      EXPECT_TRUE(WIFEXITED(one.status));
      const auto says = [&](const std::string& part) {
        EXPECT_NE(one.message.find(part), std::string::npos) << part;
      };
      if (fault.at == Point::kStart && fault.victim == 0) {
        EXPECT_EQ(WEXITSTATUS(one.status), exit_code(ErrorKind::kBadConfig));
        says("MASTER_ADDR=127.0.0.1");
        continue;
      }
      EXPECT_EQ(WEXITSTATUS(one.status), exit_code(ErrorKind::kRankLost));
      if (fault.at == Point::kStart) {
        says("of 2 ranks, 1 did not come");
        continue;
      }
      says(fmt::format("rank {}", fault.victim));
      if (fault.fault == Fault::kThrows) {
        says("failed: the file is gone; last at step 10, forward");
      } else if (fault.at == Point::kCollective && fault.victim != 0) {
        says("last at step");
      }
    }
  }
}

TEST(GlooFaults, BeforeACollective) {
  run_cases({{Fault::kKilled, Point::kCollective, 1, 3},
             {Fault::kKilled, Point::kCollective, 0, 3},
             {Fault::kThrows, Point::kCollective, 1, 3},
             {Fault::kThrows, Point::kCollective, 0}});
}

TEST(GlooFaults, Stopped) {
  run_cases({{Fault::kStopped, Point::kCollective, 1},
             {Fault::kStopped, Point::kCollective, 0},
             {Fault::kStopped, Point::kMet, 1},
             {Fault::kStopped, Point::kMet, 0},
             {Fault::kStopped, Point::kEnd, 1}});
}

TEST(GlooFaults, KilledAtTheStartAndTheEnd) {
  run_cases({{Fault::kKilled, Point::kStart, 1},
             {Fault::kKilled, Point::kStart, 0},
             {Fault::kKilled, Point::kMet, 1},
             {Fault::kKilled, Point::kEnd, 0}});
}

std::string error_of(const CommConfig& comm, int rank, int size, const std::string& addr, int port) {
  const Clock::time_point start = Clock::now();
  try {
    gloo_world(comm, rank, size, addr, port);
  } catch (const BadConfig& e) {
    EXPECT_LT(Clock::now() - start, seconds(comm.init_timeout_seconds + 5)) << e.what();
    return e.what();
  }
  return "no error";
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(text.find(part), text.npos) << part << " in: " << text;
}

void expect_error(int rank, const std::string& addr, int port, const std::vector<std::string>& parts) {
  expect_parts(error_of({.init_timeout_seconds = 3, .train_timeout_seconds = 1}, rank, 2, addr, port), parts);
}

TEST(GlooMeeting, WhatIsWrongIsNamed) {
  const int nobody = free_port(), silent = listen_at(0), talks = listen_at(0);
  const std::string silent_port = fmt::format("MASTER_PORT={}", port_of(silent));
  expect_error(0, "127.0.0.1", port_of(silent), {silent_port, "in use"});
  expect_error(0, "", nobody, {"MASTER_ADDR is empty"});
  expect_error(0, "127.0.0.1", 0, {"MASTER_PORT=0"});
  expect_error(2, "127.0.0.1", nobody, {"RANK=2 WORLD_SIZE=2"});

  std::vector<std::future<void>> waits;  // for the timeout, side by side
  const auto expect = [&](int rank, const std::string& addr, int port,
                          const std::vector<std::string>& parts) {
    waits.push_back(std::async(std::launch::async, expect_error, rank, addr, port, parts));
  };
  expect(1, "127.0.0.1", nobody, {"MASTER_ADDR=127.0.0.1", fmt::format("MASTER_PORT={}", nobody), "refused"});
  expect(1, "no-such-host.invalid", nobody, {"MASTER_ADDR=no-such-host.invalid"});
  expect(0, "no-such-host.invalid", free_port(), {"MASTER_ADDR=no-such-host.invalid"});
  expect(1, "127.0.0.1", port_of(silent), {silent_port, "another program"});
  expect(1, "127.0.0.1", port_of(talks),
         {fmt::format("MASTER_PORT={}", port_of(talks)), "not rank 0 of this run"});
  waits.push_back(std::async(std::launch::async, [&] {
    pollfd wait = {.fd = talks, .events = POLLIN, .revents = 0};
    while (poll(&wait, 1, 4000) > 0) {
      const int client = accept(talks, nullptr, nullptr);
      const std::string text = "HTTP/1.1 400 Bad Request\r\n\r\n";
      if (write(client, text.data(), text.size()) < 0) break;
      close(client);
    }
  }));
  for (std::future<void>& one : waits) one.get();
  close(silent);
  close(talks);
}

// Both ranks' errors.
std::vector<std::string> meet(std::pair<int, int> first, std::pair<int, int> second) {
  const CommConfig comm = {.init_timeout_seconds = 5, .train_timeout_seconds = 1};
  const int port = free_port();
  std::vector<std::future<std::string>> ends;
  for (const auto& [rank, size] : {first, second}) {
    ends.push_back(std::async(std::launch::async, [&, rank = rank, size = size]() -> std::string {
      try {
        gloo_world(comm, rank, size, "127.0.0.1", port);
      } catch (const Error& e) {
        return e.what();
      }
      return "";
    }));
  }
  std::vector<std::string> errors;
  for (auto& end : ends) errors.push_back(end.get());
  return errors;
}

TEST(GlooMeeting, RanksThatDoNotFit) {
  for (const std::string& error : meet({0, 2}, {1, 3})) expect_parts(error, {"WORLD_SIZE="});
  EXPECT_EQ(meet({0, 2}, {1, 2}), (std::vector<std::string>{"", ""}));
}

// Who comes to a run that goes on is refused, and the run does not notice.
TEST(GlooMeeting, AStrayProcessIsRefusedAlone) {
  const CommConfig comm = {.init_timeout_seconds = 5, .train_timeout_seconds = 5};
  const int port = free_port();
  std::atomic<bool> met = false, stop = false;
  std::vector<std::future<int>> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::async(std::launch::async, [&, rank] {
      const std::shared_ptr<World> world = gloo_world(comm, rank, 3, "127.0.0.1", port);
      int steps = 0;
      for (const Group all = world->all();; ++steps) {
        if (all.sum(stop ? 1 : 0) > 0) return steps;
        met = true;
        std::this_thread::sleep_for(milliseconds(10));
      }
    }));
  }
  for (int i = 0; i < 1000 && !met; ++i) std::this_thread::sleep_for(milliseconds(10));
  EXPECT_TRUE(met);
  const std::string where = fmt::format("MASTER_ADDR=127.0.0.1 MASTER_PORT={}: ", port);
  const std::string under_way = "; a run is under way there, which this process is no part of";
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(error_of(comm, 1, 3, "127.0.0.1", port), where + "two processes have RANK=1" + under_way);
    EXPECT_EQ(error_of(comm, 1, 2, "127.0.0.1", port),
              where + "rank 1 is given WORLD_SIZE=2, another rank 3" + under_way);
    EXPECT_EQ(error_of(comm, 7, 8, "127.0.0.1", port),
              where + "rank 7 is given WORLD_SIZE=8, another rank 3" + under_way);
    expect_parts(error_of(comm, 0, 3, "127.0.0.1", port), {"in use"});
    // One that is killed as it knocks.
    std::vector<std::vector<Process>> stray(1);
    stray[0].push_back(start_process([&] {
      std::thread([] {
        std::this_thread::sleep_for(milliseconds(5));
        raise(SIGKILL);
      }).detach();
      gloo_world(comm, 2, 3, "127.0.0.1", port);
    }));
    finish(stray, seconds(10));
  }
  std::this_thread::sleep_for(milliseconds(1500));  // in which a run that was ended would say so
  stop = true;
  for (std::future<int>& rank : ranks) {
    try {
      EXPECT_GT(rank.get(), 10);
    } catch (const Error& e) {
      ADD_FAILURE() << "the run ended: " << e.what();
    }
  }
}

}  // namespace
}  // namespace titanium
