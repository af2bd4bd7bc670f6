// A Service in this process and a client that speaks to it by hand, for tests.
#pragma once
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "titanium/engine/test_engine.h"
#include "titanium/serve/service.h"

namespace titanium {

// What a Service needs, and what it logged.
struct TestService {
  explicit TestService(Service::OpenWorld open = {}) : service(registry, log, std::move(open)) {}

  std::vector<std::string> lines;
  Log log{options()};
  EngineRegistry registry;
  Service service;

 private:
  LogOptions options() {
    LogOptions o;
    o.sink = [this](std::string_view line) { lines.emplace_back(line); };
    return o;
  }
};

inline Message method(const std::string& name, Json args = Json::object()) {
  Message message = Message::call(name, 0);
  message.body = std::move(args);
  return message;
}
inline Message create_call(const std::string& model = "llama3") {
  return method("create", {{"config", engine_json(model)}});
}

// Served by a thread from its making until it leaves.
class TestClient {
 public:
  explicit TestClient(Service& service) {
    int fds[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0) throw Bug("socketpair");
    const timeval patience{60, 0};  // an answer that never comes is a failure, and not a test that hangs
    ::setsockopt(fds[0], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    connection_.emplace(Fd(fds[0]));
    thread_ = std::thread([this, &service, fd = Fd(fds[1])]() mutable {
      Connection connection(std::move(fd));
      ending_ = service.serve(connection);
    });
    hello = receive();
  }
  ~TestClient() { leave(); }

  // Closes the connection, wherever the service is.
  Ending leave() {
    connection_.reset();
    if (thread_.joinable()) thread_.join();
    return ending_;
  }

  int fd() const { return connection_->fd(); }
  void send(const Message& message) { connection_->send(message); }
  Message receive() {
    std::optional<Message> message = connection_->receive();
    if (!message) throw PeerGone("the service ended");
    return std::move(*message);
  }

  // The answer to a call, which gets an id of its own.
  Message call(Message message) {
    const int64_t id = message.id = ++calls_;
    send(message);
    Message answer = receive();
    EXPECT_EQ(answer.id, id) << message.name;
    EXPECT_NE(answer.type, Message::Type::kCall) << message.name;
    return answer;
  }
  Message reply(Message message) {
    Message answer = call(message);
    EXPECT_EQ(answer.type, Message::Type::kReply)
        << message.name << ": " << answer.name << " " << answer.text;
    EXPECT_EQ(answer.name, message.name);
    return answer;
  }
  std::string refusal(Message message) {  // "BadData: why"
    const Message answer = call(message);
    EXPECT_EQ(answer.type, Message::Type::kError) << message.name << " " << message.body.dump();
    return answer.name + ": " + answer.text;
  }
  void start(const std::string& model = "llama3") {
    reply(create_call(model));
    reply(method("initialize"));
  }

  Message hello;

 private:
  std::optional<Connection> connection_;
  std::thread thread_;
  Ending ending_ = Ending::kGone;
  int64_t calls_ = 0;
};

// A method with the samples of `batch` as its tensors.
inline Message with_batch(const std::string& name, const EngineBatch& batch, Json args = Json::object()) {
  Message message = method(name, std::move(args));
  std::vector<int64_t> ids, mask, offsets{0};
  std::map<std::string, std::vector<double>> columns;
  for (const Sample& sample : batch.samples) {
    ids.insert(ids.end(), sample.ids.begin(), sample.ids.end());
    mask.insert(mask.end(), sample.loss_mask.begin(), sample.loss_mask.end());
    offsets.push_back(static_cast<int64_t>(ids.size()));
    for (const auto& [column, values] : sample.columns)
      columns[column].insert(columns[column].end(), values.begin(), values.end());
  }
  message.add("input_ids", ids);
  message.add("loss_mask", mask);
  message.add("offsets", offsets);
  for (const auto& [column, values] : columns) message.add("columns." + column, values);
  return message;
}

inline EngineBatch four_rows() {
  return test_batch(test_samples({6, 9, 4, 11}));
}

inline std::vector<double> numbers(const at::Tensor& tensor) {
  const at::Tensor wide = tensor.to(at::kDouble).contiguous();
  const double* data = wide.data_ptr<double>();
  return {data, data + wide.numel()};
}

inline std::string bytes_of(const TensorView& view) {
  return {reinterpret_cast<const char*>(view.data), view.nbytes};
}

// name -> bytes of all weights as the engine has them, through one stream.
inline std::map<std::string, std::string> weights_of(TestClient& client,
                                                     const std::string& dtype = "master") {
  const Message begun = client.reply(method("weights_begin", {{"dtype", dtype}}));
  const Message next = method("weights_next", {{"stream", begun.body.at("stream")}});
  std::map<std::string, std::string> weights;
  while (true) {
    const Message bucket = client.reply(next);
    if (bucket.type != Message::Type::kReply || bucket.body.at("end") == true) return weights;
    for (const TensorView& view : bucket.tensors) weights[view.name] = bytes_of(view);
  }
}

}  // namespace titanium
