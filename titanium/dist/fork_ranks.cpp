#include "titanium/dist/fork_ranks.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr int kAssertionFailed = 99;

// What a child threw: the kind's digit and the message.
std::string what_it_throws(const std::function<std::shared_ptr<World>()>& open,
                           const std::function<void(std::shared_ptr<World>)>& work) {
  std::shared_ptr<World> world;
  const auto failed = [&](ErrorKind kind, const std::string& text) {
    if (world) world->fail(text);
    return static_cast<char>('0' + static_cast<int>(kind)) + text;
  };
  try {
    world = open();
    work(world);
  } catch (const Error& e) {
    return failed(e.kind(), e.what());
  } catch (const std::exception& e) {
    return failed(ErrorKind::kBug, e.what());
  }
  return "";
}

[[noreturn]] void be_a_rank(int to, const std::function<std::string()>& run) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  const std::string text = run();
  [[maybe_unused]] const ssize_t written = ::write(to, text.data(), text.size());
  std::fflush(nullptr);
  ::_exit(::testing::Test::HasFailure() ? kAssertionFailed : 0);
}

[[noreturn]] void raise(const std::string& text) {
  const std::string message = text.substr(1);
  switch (static_cast<ErrorKind>(text[0] - '0')) {
    case ErrorKind::kBadConfig:
      throw BadConfig("{}", message);
    case ErrorKind::kBadData:
      throw BadData("{}", message);
    case ErrorKind::kBadCheckpoint:
      throw BadCheckpoint("{}", message);
    case ErrorKind::kRankLost:
      throw RankLost("{}", message);
    default:
      throw Bug("{}", message);
  }
}

}  // namespace

void fork_ranks(int size, const std::function<std::shared_ptr<World>(int rank, int size)>& open,
                const std::function<void(std::shared_ptr<World>)>& work, int killed) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  std::vector<pollfd> pipes;
  for (int rank = 0; rank < size; ++rank) {
    int ends[2] = {};
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::close(ends[0]);
      be_a_rank(ends[1], [&] { return what_it_throws([&] { return open(rank, size); }, work); });
    }
    ::close(ends[1]);
    children.push_back(child);
    pipes.push_back({.fd = ends[0], .events = POLLIN, .revents = 0});
  }
  std::string cause, lost;  // the first that came
  for (size_t open_ends = pipes.size(); open_ends > 0;) {
    if (::poll(pipes.data(), pipes.size(), -1) < 0) continue;
    for (pollfd& pipe : pipes) {
      if (pipe.fd < 0 || pipe.revents == 0) continue;
      char bytes[8192];
      const ssize_t got = ::read(pipe.fd, bytes, sizeof bytes);
      if (got > 0) {
        const std::string text(bytes, got);
        std::string& first = text[0] == '0' + static_cast<int>(ErrorKind::kRankLost) ? lost : cause;
        if (first.empty()) first = text;
      }
      ::close(pipe.fd);
      pipe.fd = -1;
      --open_ends;
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    ::waitpid(children[rank], &status, 0);
    if (rank == killed) {
      EXPECT_TRUE(WIFSIGNALED(status)) << "rank " << rank << " lived on";
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0)
          << "rank " << rank
          << (WIFSIGNALED(status) ? fmt::format(" was ended by signal {}", WTERMSIG(status))
                                  : fmt::format(" ended with {}", WEXITSTATUS(status)));
    }
  }
  if (!cause.empty()) raise(cause);
  if (!lost.empty()) raise(lost);
}

}  // namespace titanium
