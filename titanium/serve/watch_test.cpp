#include "titanium/serve/watch.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>

namespace titanium {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::pair<Fd, Fd> socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw Bug("socketpair");
  return {Fd(fds[0]), Fd(fds[1])};
}

bool soon(const std::function<bool()>& true_at_last) {
  for (int i = 0; i < 2000; ++i) {
    if (true_at_last()) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

TEST(Watch, AClientThatIsGoneEndsALongComputation) {
  auto [a, b] = socket_pair();
  Connection connection(std::move(b));
  std::atomic<bool> gave_up = false;
  WatchOptions options;
  options.grace = milliseconds(50);
  options.give_up = [&](const std::string& why) {
    EXPECT_EQ(why, "the client is gone");
    gave_up = true;
  };
  Watch watch(connection, options);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(gave_up);
  a = Fd();
  EXPECT_TRUE(soon([&] { return gave_up.load(); }));
}

TEST(Watch, AServerThatComesBackInTimeIsLeftAlone) {
  auto [a, b] = socket_pair();
  Connection connection(std::move(b));
  std::atomic<bool> gave_up = false;
  {
    WatchOptions options;
    options.give_up = [&](const std::string&) { gave_up = true; };
    Watch watch(connection, options);
    a = Fd();
    EXPECT_FALSE(connection.receive());
  }
  EXPECT_FALSE(gave_up);
}

TEST(Watch, UnreadRequestsDoNotLookLikeAnEnd) {
  auto [a, b] = socket_pair();
  Connection client(std::move(a)), server(std::move(b));
  std::atomic<bool> gave_up = false;
  WatchOptions options;
  options.grace = milliseconds(1);
  options.give_up = [&](const std::string&) { gave_up = true; };
  Watch watch(server, options);
  client.send(Message::call("a", 1));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_FALSE(gave_up);
  EXPECT_TRUE(server.receive());
}

Fd connect_to(const std::string& abstract_name) {
  Fd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, abstract_name.data(), abstract_name.size());
  EXPECT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address),
                      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + abstract_name.size())),
            0);
  return fd;
}

TEST(Watch, ASecondClientHearsThatItIsOneTooMany) {
  const std::string name = "titanium-watch-" + std::to_string(::getpid());
  Listener listener("unix:@" + name);
  Connection client(connect_to(name));
  Connection server(listener.accept());
  WatchOptions options;
  options.listener = &listener;
  Watch watch(server, options);
  for (int i = 0; i < 3; ++i) {
    Connection second(connect_to(name));
    const auto answer = second.receive();
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->type, Message::Type::kError);
    EXPECT_EQ(answer->name, "BadConfig");
    EXPECT_NE(answer->text.find("one at a time"), std::string::npos);
    EXPECT_FALSE(second.receive());
  }
  client.send(Message::call("still here", 1));
  EXPECT_TRUE(server.receive());
}

// A child of the client's that inherited the socket keeps it open; the death of the client's process is what
// counts.
TEST(Watch, AnInheritedSocketDoesNotHideTheDeath) {
  const std::string name = "titanium-heir-" + std::to_string(::getpid());
  Listener listener("unix:@" + name);
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  const pid_t client = ::fork();
  if (client == 0) {
    const Fd fd = connect_to(name);
    if (::fork() == 0) {
      ::close(hold[1]);
      char byte;
      while (::read(hold[0], &byte, 1) > 0) {
      }
      ::_exit(0);
    }
    ::pause();
    ::_exit(0);
  }
  Connection server(listener.accept());
  std::atomic<bool> gave_up = false;
  {
    WatchOptions options;
    options.grace = milliseconds(1);
    options.give_up = [&](const std::string&) { gave_up = true; };
    Watch watch(server, options);
    std::this_thread::sleep_for(milliseconds(30));
    EXPECT_FALSE(gave_up);
    ::kill(client, SIGKILL);
    EXPECT_TRUE(soon([&] { return gave_up.load(); }));
  }
  ::waitpid(client, nullptr, 0);
  ::close(hold[0]);
  ::close(hold[1]);
}

TEST(Watch, ASignalEndsTheServer) {
  sigset_t set, old;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  ASSERT_EQ(::pthread_sigmask(SIG_BLOCK, &set, &old), 0);
  {
    const Fd signals(::signalfd(-1, &set, SFD_CLOEXEC));
    auto [a, b] = socket_pair();
    Connection connection(std::move(b));
    WatchOptions options;
    options.signals = signals.get();
    Watch watch(connection, options);
    ::kill(::getpid(), SIGTERM);
    EXPECT_FALSE(connection.receive()) << "the wait for a request ends";
    signalfd_siginfo info;
    EXPECT_EQ(::read(signals.get(), &info, sizeof info), static_cast<ssize_t>(sizeof info));
  }
  ::pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

TEST(Watch, TheReasonIsKnownBeforeTheConnectionIsCut) {
  auto [a, b] = socket_pair();
  Connection connection(std::move(b));
  const Fd signals(::eventfd(1, EFD_CLOEXEC));  // readable, as a signalfd is once a signal has come
  std::atomic<bool> known = false, told = false;
  {
    WatchOptions options;
    options.signals = signals.get();
    options.cuts = [&](const std::string& why) {
      EXPECT_EQ(why, "a signal asked the server to end");
      std::this_thread::sleep_for(milliseconds(100));
      known = true;
    };
    options.lost = [&](const std::string&) { told = true; };
    Watch watch(connection, options);
    EXPECT_FALSE(connection.receive());
    EXPECT_TRUE(known);
  }
  EXPECT_TRUE(told);
}

}  // namespace
}  // namespace titanium
