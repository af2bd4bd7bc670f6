#include "titanium/serve/connection.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "titanium/base/random.h"
#include "titanium/serve/listener.h"

namespace titanium {
namespace {

std::pair<Fd, Fd> socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw Bug("socketpair");
  return {Fd(fds[0]), Fd(fds[1])};
}

int64_t open_fds() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

Message with_numbers(int64_t count) {
  Message message = Message::call("weights_next", 3);
  std::vector<int64_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int64_t>(i * i);
  message.add("values", values);
  message.add("more", std::vector<double>{1.5});
  return message;
}

void expect_numbers(const Message& message, int64_t count) {
  const TensorView& view = message.at("values");
  ASSERT_EQ(view.shape, std::vector<int64_t>{count});
  for (int64_t i = 0; i < count; i += 997) {
    int64_t value = 0;
    std::memcpy(&value, view.data + 8 * i, 8);
    ASSERT_EQ(value, i * i);
  }
  double last = 0;
  std::memcpy(&last, message.at("more").data, 8);
  EXPECT_EQ(last, 1.5);
}

TEST(Connection, SmallAndLargeMessagesArriveInOrder) {
  const int64_t before = open_fds();
  {
    auto [a, b] = socket_pair();
    Connection left(std::move(a)), right(std::move(b));
    EXPECT_TRUE(left.is_unix());
    std::thread sender([&left] {
      for (const int64_t count : {0, 10, 100'000, 1'000'000, 3}) left.send(with_numbers(count));
    });
    for (const int64_t count : {0, 10, 100'000, 1'000'000, 3}) {
      const auto message = right.receive();
      ASSERT_TRUE(message);
      expect_numbers(*message, count);
    }
    sender.join();
    left.shutdown();
    EXPECT_FALSE(right.receive()) << "closed between two messages is a plain end";
  }
  EXPECT_EQ(open_fds(), before);
}

TEST(Connection, ATensorOutlivesTheConnection) {
  Message kept;
  {
    auto [a, b] = socket_pair();
    Connection left(std::move(a)), right(std::move(b));
    left.send(with_numbers(500'000));  // in a memfd, so that nobody need read meanwhile
    kept = *right.receive();
  }
  expect_numbers(kept, 500'000);
}

TEST(Connection, OverTcpEverythingIsOnTheStream) {
  Listener listener("tcp:127.0.0.1:0");
  EXPECT_FALSE(listener.address().ends_with(":0"));
  std::thread client([&] {
    Fd fd(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_storage address{};
    socklen_t bytes = sizeof address;
    ::getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&address), &bytes);
    ASSERT_EQ(::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), bytes), 0);
    Connection connection(std::move(fd));
    connection.send(with_numbers(700'000));
    EXPECT_FALSE(connection.receive());
  });
  {
    Connection server(listener.accept());
    EXPECT_FALSE(server.is_unix());
    const auto message = server.receive();
    ASSERT_TRUE(message);
    expect_numbers(*message, 700'000);
  }
  client.join();
}

TEST(Connection, AnEndInsideAMessageIsTold) {
  auto [a, b] = socket_pair();
  Connection right(std::move(b));
  const auto frame = encode_frame({0, 1 << 20});
  ASSERT_EQ(::write(a.get(), frame.data(), frame.size()), static_cast<ssize_t>(frame.size()));
  a = Fd();
  EXPECT_THROW(right.receive(), PeerGone);
  EXPECT_THROW(right.send(with_numbers(1)), PeerGone);
}

TEST(Connection, BytesThatAreNoMessageAreRefused) {
  auto [a, b] = socket_pair();
  Connection right(std::move(b));
  const char text[] = "GET / HTTP/1.1\r\nHost: localhost\r\n";
  ASSERT_GT(::write(a.get(), text, sizeof text), 0);
  EXPECT_THROW(right.receive(), BadData);
}

void send_fd(int socket, const Frame& frame, int fd, int copies = 1) {
  auto bytes = encode_frame(frame);
  iovec piece{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &piece;
  header.msg_iovlen = 1;
  header.msg_control = control;
  header.msg_controllen = CMSG_SPACE(copies * sizeof(int));
  cmsghdr* c = CMSG_FIRSTHDR(&header);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(copies * sizeof(int));
  for (int i = 0; i < copies; ++i) std::memcpy(CMSG_DATA(c) + i * sizeof(int), &fd, sizeof fd);
  ASSERT_EQ(::sendmsg(socket, &header, 0), static_cast<ssize_t>(bytes.size()));
}

std::string refusal(const Frame& frame, int fd, int copies = 1) {
  auto [a, b] = socket_pair();
  Connection right(std::move(b));
  send_fd(a.get(), frame, fd, copies);
  try {
    right.receive();
  } catch (const BadData& error) {
    return error.what();
  }
  return "";
}

TEST(Connection, ADescriptorMustBeASealedMemfdOfThatLength) {
  const int64_t before = open_fds();
  {
    const Fd memfd(::memfd_create("test", MFD_ALLOW_SEALING));
    ASSERT_EQ(::ftruncate(memfd.get(), 64), 0);
    EXPECT_NE(refusal({1, 64}, memfd.get()).find("not a memfd sealed"), std::string::npos);
    ASSERT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE), 0);
    EXPECT_NE(refusal({1, 65}, memfd.get()).find("the frame says 65"), std::string::npos);
    EXPECT_NE(refusal({1, uint64_t{1} << 35}, memfd.get()).find("the frame says"), std::string::npos);
    EXPECT_NE(refusal({0, 64}, memfd.get()).find("1 descriptors came"), std::string::npos);
    EXPECT_NE(refusal({1, 64}, memfd.get(), 2).find("2 descriptors came"), std::string::npos);
    EXPECT_NE(refusal({1, 64}, memfd.get(), 8).find("more descriptors"), std::string::npos);
    EXPECT_NE(refusal({1, 64}, memfd.get()).find("header"), std::string::npos) << "the content is no message";
    const Fd file(::open("/proc/self/exe", O_RDONLY));
    EXPECT_NE(refusal({1, 64}, file.get()).find("not a memfd sealed"), std::string::npos);
  }
  EXPECT_EQ(open_fds(), before) << "refused descriptors are closed";
}

TEST(Connection, OnlyStreamSockets) {
  EXPECT_THROW(Connection(Fd(::open("/dev/null", O_RDWR))), BadConfig);
  EXPECT_THROW(Connection(Fd(::socket(AF_UNIX, SOCK_DGRAM, 0))), BadConfig);
}

TEST(Listener, AddressesHaveThreeForms) {
  for (const char* bad :
       {"", "unix:", "unix:@", "tcp:1234", "tcp:127.0.0.1", "tcp:127.0.0.1:x", "tcp:127.0.0.1:70000",
        "tcp:0.0.0.0:0", "tcp:10.0.0.1:80", "tcp:example.org:80", "http://localhost"}) {
    EXPECT_THROW(Listener{bad}, BadConfig) << bad;
  }
  EXPECT_THROW(Listener("unix:/tmp/" + std::string(200, 'x')), BadConfig);
}

TEST(Listener, ASocketFileIsTakenOverFromTheDeadOnly) {
  const auto folder =
      std::filesystem::temp_directory_path() / ("titanium-listen-" + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  const std::string path = (folder / "socket").string();
  {
    Listener first("unix:" + path);
    EXPECT_EQ(std::filesystem::status(path).permissions(),
              std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
    EXPECT_THROW(Listener("unix:" + path), BadConfig) << "somebody listens there";
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  if (::fork() == 0) {
    Listener dying("unix:" + path);
    ::_exit(0);
  }
  while (!std::filesystem::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  { Listener second("unix:" + path); }
  EXPECT_FALSE(std::filesystem::exists(path));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace titanium
