#include "titanium/dist/launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <functional>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

struct Outcome {
  int status = -1;  // of waitpid
  int code() const { return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status); }
  std::vector<std::string> lines;
  std::vector<pid_t> pids;  // of the ranks that said theirs
  bool has(const std::string& line) const {
    return std::find(lines.begin(), lines.end(), line) != lines.end();
  }
  std::string text() const {
    std::string all;
    for (const std::string& line : lines) all += line.substr(0, 200) + "\n";
    return all;
  }
};

// Runs the program with standard output and error in one; `meddle` is called once with the launcher and
// the ranks when all `ranks` have said their pids.
Outcome run(const std::vector<std::string>& arguments, size_t ranks = 0,
            const std::function<void(pid_t, const std::vector<pid_t>&)>& meddle = {}) {
  int ends[2] = {};
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(ends[1], STDERR_FILENO);
    const std::string program = TITANIUM_BINARY_DIR "/ranks_program";
    std::vector<char*> argv = {const_cast<char*>(program.c_str())};
    for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  Outcome outcome;
  std::string text;
  char bytes[16384];
  bool meddled = !meddle;
  for (ssize_t got = 0; (got = ::read(ends[0], bytes, sizeof bytes)) > 0;) {
    text.append(bytes, got);
    for (size_t end = 0; (end = text.find('\n')) != text.npos; text.erase(0, end + 1)) {
      outcome.lines.push_back(text.substr(0, end));
      std::istringstream words(outcome.lines.back());
      std::string prefix, word;
      pid_t pid = 0;
      if (words >> prefix >> word >> pid && word == "pid") outcome.pids.push_back(pid);
    }
    if (!meddled && outcome.pids.size() == ranks) {
      meddled = true;
      meddle(child, outcome.pids);
    }
  }
  ::close(ends[0]);
  EXPECT_EQ(text, "") << "a line without an end";
  ::waitpid(child, &outcome.status, 0);
  return outcome;
}

bool gone(pid_t pid) {
  for (int i = 0; i < 300; ++i) {
    if (::kill(pid, 0) != 0 && errno == ESRCH) return true;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return false;
}

void expect_none_left(const Outcome& outcome, size_t ranks) {
  EXPECT_EQ(outcome.pids.size(), ranks) << outcome.text();
  for (const pid_t pid : outcome.pids) EXPECT_TRUE(gone(pid)) << "process " << pid << " is left";
}

TEST(Launch, AllRanksEndWell) {
  const Outcome outcome = run({"launch", "4"});
  EXPECT_EQ(outcome.code(), 0) << outcome.text();
  EXPECT_EQ(outcome.lines.size(), 4u) << outcome.text();
  for (const std::string& line : outcome.lines) EXPECT_NE(line.find(" sum 6"), line.npos) << line;
  expect_none_left(outcome, 4);
}

TEST(Launch, RanksGetTorchrunsVariables) {
  const Outcome outcome = run({"launch", "2", "env"});
  EXPECT_EQ(outcome.code(), 0);
  EXPECT_TRUE(outcome.has("[1] RANK=1") && outcome.has("[1] LOCAL_RANK=1") &&
              outcome.has("[0] WORLD_SIZE=2") && outcome.has("[0] LOCAL_WORLD_SIZE=2") &&
              outcome.has("[0] MASTER_ADDR=127.0.0.1"))
      << outcome.text();
}

TEST(Launch, LinesStayWhole) {
  const Outcome outcome = run({"launch", "3", "lines"});
  EXPECT_EQ(outcome.code(), 0);
  ASSERT_EQ(outcome.lines.size(), 3u * 201);
  int next[3] = {};
  for (const std::string& line : outcome.lines) {
    const int rank = line[1] - '0';
    const int i = next[rank]++;
    EXPECT_EQ(line, fmt::format("[{}] {}", rank,
                                i == 200 ? "no end" : std::string(3000, line[1]) + std::to_string(i)));
  }
}

struct Grief {
  std::string what;
  int code;
  std::string last, others;  // others: what the other ranks say
};

TEST(Launch, WhenOneRankEndsAllDo) {
  const std::vector<Grief> griefs = {
      {"throw", 3, "rank 1 ended with status 3 (BadData); the other ranks were ended",
       "rank 1 failed: no such file: data.jsonl; its last progress: step 10, forward"},
      {"exit", 7, "rank 1 ended with status 7; the other ranks were ended", ""},
      {"kill", 137, "rank 1 was ended by signal 9 (Killed); the other ranks were ended", ""},
      {"abort", 134, "rank 1 was ended by signal 6 (Aborted); the other ranks were ended", ""},
  };
  for (const Grief& grief : griefs) {
    const auto start = Clock::now();
    const Outcome outcome = run({"launch", "3", grief.what, "1"});
    EXPECT_EQ(outcome.code(), grief.code) << outcome.text();
    const std::string& last = outcome.lines.back();
    // All may have ended before the others had to be.
    EXPECT_TRUE(last.starts_with("titanium launch: " + grief.last.substr(0, grief.last.find(';'))))
        << outcome.text();
    EXPECT_TRUE(grief.what != "throw" || outcome.has("[1] BadData: no such file: data.jsonl"))
        << outcome.text();
    EXPECT_LT(Clock::now() - start, seconds(30));
    expect_none_left(outcome, 3);
  }
}

TEST(Launch, ARankThatStopsIsNamedAndEnded) {
  const auto start = Clock::now();
  const Outcome outcome = run({"launch", "3", "stop", "1"});
  EXPECT_EQ(outcome.code(), 5) << outcome.text();
  const std::string text = outcome.text();
  EXPECT_NE(
      text.find(
          "RankLost: rank 1 did not come to an all_reduce within 2 s (comm.train_timeout_seconds); its last "
          "progress: step 10, forward"),
      text.npos)
      << text;
  EXPECT_LT(Clock::now() - start, seconds(40));
  expect_none_left(outcome, 3);
}

TEST(Launch, ARankThatNeverMeetsTheOthersIsNamed) {
  const Outcome outcome = run({"launch", "3", "never", "2"});
  EXPECT_EQ(outcome.code(), 5) << outcome.text();
  EXPECT_TRUE(outcome.has("[0] RankLost: rank 2 did not come within 1 s (comm.init_timeout_seconds)"))
      << outcome.text();
  EXPECT_TRUE(outcome.has("[1] RankLost: rank 2 did not come within 1 s (comm.init_timeout_seconds)"))
      << outcome.text();
}

TEST(Launch, SignalsArePassedOn) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const Outcome outcome =
        run({"launch", "2", "forever"}, 2, [&](pid_t launcher, auto&) { ::kill(launcher, signal); });
    EXPECT_EQ(outcome.code(), 128 + signal) << outcome.text();
    expect_none_left(outcome, 2);
  }
}

TEST(Launch, RanksThatEndWellOnASignalAreNotEnded) {
  const Outcome outcome =
      run({"launch", "3", "obey"}, 3, [&](pid_t launcher, auto&) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(outcome.code(), 128 + SIGTERM) << outcome.text();
  for (const char* line : {"[0] saved", "[1] saved", "[2] saved"})
    EXPECT_TRUE(outcome.has(line)) << line << "\n" << outcome.text();
  EXPECT_EQ(outcome.text().find("titanium launch"), std::string::npos) << outcome.text();
}

TEST(Launch, RanksThatNeverStopTalkingAreHeardAndEnded) {
  const Outcome outcome =
      run({"launch", "2", "flood"}, 2, [&](pid_t launcher, auto&) { ::kill(launcher, SIGTERM); });
  EXPECT_EQ(outcome.code(), 128 + SIGTERM);
  expect_none_left(outcome, 2);
}

bool is_stopped(pid_t pid) {
  std::ifstream stat(fmt::format("/proc/{}/stat", pid));
  const std::string text(std::istreambuf_iterator<char>(stat), {});
  return text.find(") T ") != text.npos;
}

// Stops all ranks, and then asks the launcher to end.  What it takes without an end is cut off.
Outcome end_stopped(const std::vector<std::string>& arguments, int signal) {
  std::jthread cut_off;
  return run(arguments, 2, [&](pid_t launcher, const std::vector<pid_t>& ranks) {
    for (const pid_t rank : ranks) ::kill(rank, SIGSTOP);
    for (const pid_t rank : ranks) {
      for (int i = 0; i < 1000 && !is_stopped(rank); ++i) std::this_thread::sleep_for(milliseconds(5));
      EXPECT_TRUE(is_stopped(rank));
    }
    ::kill(launcher, signal);
    cut_off = std::jthread([launcher](const std::stop_token& done) {
      for (int i = 0; i < 300 && !done.stop_requested(); ++i) std::this_thread::sleep_for(milliseconds(100));
      if (!done.stop_requested()) ::kill(launcher, SIGKILL);
    });
  });
}

TEST(Launch, RanksThatAreStoppedHearThatTheyShallEnd) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    const Outcome outcome = end_stopped({"launch", "2", "forever"}, signal);
    EXPECT_EQ(outcome.status, (128 + signal) << 8) << outcome.text();
    expect_none_left(outcome, 2);
  }
  const Outcome outcome = end_stopped({"launch", "2", "obey"}, SIGTERM);
  EXPECT_EQ(outcome.status, (128 + SIGTERM) << 8) << outcome.text();
  EXPECT_TRUE(outcome.has("[0] saved") && outcome.has("[1] saved")) << outcome.text();
}

TEST(Launch, ARankThatStopsWhenItShallEndIsKilled) {
  const Outcome outcome = end_stopped({"launch", "2", "stubborn"}, SIGTERM);
  EXPECT_EQ(outcome.status, (128 + SIGKILL) << 8) << outcome.text();
  expect_none_left(outcome, 2);
}

TEST(Launch, NoRankOutlivesALauncherThatIsKilled) {
  const Outcome outcome =
      run({"launch", "3", "forever"}, 3, [](pid_t launcher, auto&) { ::kill(launcher, SIGKILL); });
  EXPECT_TRUE(WIFSIGNALED(outcome.status));
  expect_none_left(outcome, 3);
}

TEST(Launch, WhatCannotRun) {
  EXPECT_THROW(launch_ranks(0, {"true"}), BadConfig);
  EXPECT_THROW(launch_ranks(2, {}), BadConfig);
  EXPECT_EQ(launch_ranks(2, {"/no/such/program"}), 127);
}

}  // namespace
}  // namespace titanium
