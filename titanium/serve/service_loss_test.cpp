// A loss of the client's own: a call of the service inside one of the client's.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "titanium/serve/test_client.h"

namespace titanium {
namespace {

Message with_own_loss(int64_t sequences = 2, const std::string& name = "forward_backward_batch") {
  return with_batch(name, four_rows(),
                    {{"loss", {{"name", "external"}}}, {"micro", {{"sequences", sequences}}}});
}

// Minus the mean log-prob of the trained tokens, as {"name": "sft"} computes it.
Message sft_answer(const Message& question) {
  const std::vector<Sample> samples = four_rows().samples;
  double tokens = 0;
  for (const Sample& sample : samples) tokens += static_cast<double>(trained_tokens(sample));
  const std::vector<double> log_probs = read_numbers(question.at("log_probs"));
  const std::vector<int64_t> offsets = read_integers(question, "offsets"),
                             rows = read_integers(question, "sample");
  std::vector<double> gradient(log_probs.size());
  double loss = 0;
  for (size_t d = 0; d < rows.size(); ++d) {
    if (rows[d] < 0) continue;  // filler
    const Sample& sample = samples.at(static_cast<size_t>(rows[d]));
    for (size_t t = 0; t + 1 < sample.ids.size(); ++t) {
      const size_t at = static_cast<size_t>(offsets[d]) + t;
      gradient.at(at) = -sample.loss_mask[t + 1] / tokens;
      loss += gradient[at] * log_probs[at];
    }
  }
  Message answer = Message::reply_to(question);
  answer.body = {{"loss", loss}, {"metrics", {{"asked", {{"sum", 1.0}, {"op", "sum"}}}}}};
  answer.add("log_probs", gradient);
  return answer;
}

// Runs a call, answering the service's questions; what comes in the end.
Message converse(TestClient& client, const Message& call,
                 const std::function<Message(const Message&)>& answer) {
  client.send(call);
  while (true) {
    Message message = client.receive();
    if (message.type != Message::Type::kCall) return message;
    client.send(answer(message));
  }
}

double norm(TestClient& client) {
  return as_number(client.reply(method("optimizer_step")).body.at("grad_norm"), "grad_norm");
}

TEST(ServiceLoss, EqualsTheBuiltInOne) {
  TestService served;
  TestClient client(served.service);
  client.start();
  TestEngine engine(engine_json("llama3"));
  const SftLoss sft;
  EngineBatch batch = four_rows();
  batch.micro.sequences = 2;
  const EngineOutput expected = engine->forward_backward_batch(batch, &sft, false);
  const double expected_norm = engine->optimizer_step();

  std::vector<int64_t> rows;
  int64_t asked = 0;
  Message call = with_own_loss();
  call.id = 77;
  const Message reply = converse(client, call, [&](const Message& question) {
    EXPECT_EQ(question.name, "loss");
    EXPECT_EQ(question.body, Json({{"i", asked++}, {"forward_only", false}}));
    const size_t tokens = read_numbers(question.at("log_probs")).size();
    EXPECT_EQ(read_integers(question, "offsets").back(), static_cast<int64_t>(tokens));
    EXPECT_EQ(question.find("entropy"), nullptr) << "not asked for";
    EXPECT_EQ(question.find("values"), nullptr);
    for (const int64_t row : read_integers(question, "sample"))
      if (row >= 0) rows.push_back(row);
    return sft_answer(question);
  });
  ASSERT_EQ(reply.type, Message::Type::kReply) << reply.text;
  EXPECT_EQ(reply.id, 77);
  EXPECT_EQ(asked, 2) << "once a micro-batch";
  std::sort(rows.begin(), rows.end());
  EXPECT_EQ(rows, (std::vector<int64_t>{0, 1, 2, 3}));
  const std::vector<double> losses = read_numbers(reply.at("loss"));
  ASSERT_EQ(losses.size(), expected.loss.size());
  for (size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i] / expected.loss[i], 1, 1e-6);
  EXPECT_EQ(reply.body.at("metrics").at("asked").at("value"), 2.0);
  EXPECT_NEAR(norm(client) / expected_norm, 1, 1e-6);
}

TEST(ServiceLoss, OfEveryMethodWithABatch) {
  TestService served;
  TestClient client(served.service);
  client.start();
  for (const auto& [name, forward_only, questions] :
       {std::tuple{"infer_batch", true, 2}, {"forward_step", true, 1}, {"train_batch", false, 2}}) {
    Message call = with_own_loss(2, name);
    if (questions == 1) call.body.erase("micro");
    call.body["calculate_entropy"] = call.body["calculate_sum_pi_squared"] = true;
    int asked = 0;
    const Message reply = converse(client, call, [&](const Message& question) {
      ++asked;
      EXPECT_EQ(question.body.at("forward_only"), forward_only) << name;
      EXPECT_NE(question.find("entropy"), nullptr);
      EXPECT_NE(question.find("sum_pi_squared"), nullptr);
      return sft_answer(question);
    });
    EXPECT_EQ(reply.type, Message::Type::kReply) << name << ": " << reply.text;
    EXPECT_EQ(reply.name, name);
    EXPECT_EQ(asked, questions) << name;
  }
}

TEST(ServiceLoss, WhatIsNotFiniteCrosses) {
  TestService served;
  TestClient client(served.service);
  client.start();
  const Message reply = converse(client, with_own_loss(4, "infer_batch"), [](const Message& question) {
    Message answer = Message::reply_to(question);
    answer.body = {{"loss", "nan"}, {"metrics", {{"high", {{"sum", "inf"}, {"op", "max"}}}}}};
    return answer;
  });
  ASSERT_EQ(reply.type, Message::Type::kReply) << reply.text;
  EXPECT_TRUE(std::isnan(read_numbers(reply.at("loss")).at(0)));
  EXPECT_EQ(reply.body.at("metrics").at("high").at("value"), "inf");
}

TEST(ServiceLoss, CallsMeanwhileAreRefused) {
  TestService served;
  TestClient client(served.service);
  client.start();
  Message outer = with_own_loss(4);
  outer.id = 1;
  client.send(outer);
  const Message question = client.receive();
  for (const Message& inner : {method("optimizer_step"), method("close"), method("sing"), with_own_loss()}) {
    EXPECT_EQ(client.refusal(inner),
              "BadConfig: " + inner.name + ": not possible while the engine waits for loss");
  }
  client.send(sft_answer(question));
  const Message reply = client.receive();
  EXPECT_EQ(reply.type, Message::Type::kReply);
  EXPECT_EQ(reply.name, "forward_backward_batch");
  EXPECT_EQ(reply.id, 1);
  EXPECT_GT(norm(client), 0);
}

TEST(ServiceLoss, AnswersThatAreNoneAreRefusedAndNamed) {
  TestService served;
  TestClient client(served.service);
  client.start();
  const auto of_body = [](Json body) { return [body](Message& answer) { answer.body = body; }; };
  const auto of_tensor = [](const char* name, const auto& values) {
    return [=](Message& answer) {
      answer.tensors.clear();
      answer.add(name, values);
    };
  };
  struct Wrong {
    std::function<void(Message&)> spoil;
    const char* kind;
    const char* text;
  };
  const std::vector<Wrong> all = {
      {of_body(Json::object()), "BadConfig", "'loss' is missing"},
      {of_body({{"loss", "much"}}), "BadData", "loss"},
      {of_body({{"loss", {1, 2}}}), "BadData", "loss"},
      {of_body({{"loss", 1.0}, {"gradient", 1}}), "BadConfig", "unknown argument 'gradient'"},
      {of_body({{"loss", 1.0}, {"metrics", 3}}), "BadData", "metrics"},
      {of_body({{"loss", 1.0}, {"metrics", {{"x", 3}}}}), "BadData", "'x'"},
      {of_body({{"loss", 1.0}, {"metrics", {{"x", {{"sum", 1}, {"op", "median"}}}}}}), "BadData", "median"},
      {of_body({{"loss", 1.0}, {"metrics", {{"x", {{"sum", "all"}}}}}}), "BadData", "'x'"},
      {of_tensor("log_probs", std::vector<double>{1, 2}), "BadData", "2 numbers by log-probs"},
      {of_tensor("log_probs", std::vector<int64_t>{1, 2}), "BadData", "I64"},
      {of_tensor("entropy", std::vector<double>{1, 2}), "BadData", "entropy, which it was not given"},
      {of_tensor("values", std::vector<double>{1, 2}), "BadData", "values, which it was not given"},
      {[](Message& answer) { answer = Message::error_to(answer.id, "KeyError", "mine"); }, "BadData",
       "the caller's loss failed: mine"},
      {[](Message& answer) { answer.id += 7; }, "BadData", "the answer has id"},
  };
  for (const Wrong& wrong : all) {
    int asked = 0;
    const Message refused = converse(client, with_own_loss(), [&](const Message& question) {
      Message answer = sft_answer(question);
      if (++asked == 2) wrong.spoil(answer);  // there is half a sum of gradients by then
      return answer;
    });
    EXPECT_EQ(refused.type, Message::Type::kError) << wrong.text;
    EXPECT_EQ(refused.name, wrong.kind) << refused.text;
    EXPECT_NE(refused.text.find(wrong.text), std::string::npos) << refused.text;
    EXPECT_EQ(norm(client), 0) << "half a sum is not kept: " << wrong.text;
  }
  const Message reply = converse(client, with_own_loss(), sft_answer);
  EXPECT_EQ(reply.type, Message::Type::kReply) << "the engine lives on";
  EXPECT_GT(norm(client), 0);
}

TEST(ServiceLoss, BytesThatAreNoMessageInsideOneEndIt) {
  TestService served;
  {
    TestClient client(served.service);
    client.start();
    client.send(with_own_loss());
    EXPECT_EQ(client.receive().name, "loss");
    const std::string frame(kFrameBytes, 'x');  // not a byte more: what comes next could be anything
    ASSERT_EQ(::write(client.fd(), frame.data(), frame.size()), static_cast<ssize_t>(frame.size()));
    const Message refused = client.receive();
    EXPECT_EQ(refused.name, "BadData");
    EXPECT_EQ(refused.id, 0);
    EXPECT_THROW(client.receive(), PeerGone);
    EXPECT_EQ(client.leave(), Ending::kMalformed);
  }
  TestClient next(served.service);
  EXPECT_EQ(norm(next), 0);
}

TEST(ServiceLoss, AClientThatGoesInsideOne) {
  TestService served;
  {
    TestClient client(served.service);
    client.start();
    client.reply(method("enter_mode", {{"mode", "train"}, {"zero_grad_on_exit", false}}));
    client.send(with_own_loss());
    client.send(sft_answer(client.receive()));
    EXPECT_EQ(client.receive().name, "loss");
    EXPECT_EQ(client.leave(), Ending::kGone);
    EXPECT_FALSE(served.service.failure());
    EXPECT_TRUE(served.service.was_called());
  }
  TestClient next(served.service);
  EXPECT_EQ(next.hello.body.at("created"), true);
  EXPECT_EQ(next.reply(method("attach")).body.at("initialized"), true);
  EXPECT_EQ(next.refusal(method("exit_mode")), "BadConfig: exit_mode: no mode has been entered");
  EXPECT_EQ(norm(next), 0);
  EXPECT_EQ(converse(next, with_own_loss(), sft_answer).type, Message::Type::kReply);
  EXPECT_GT(norm(next), 0);
}

}  // namespace
}  // namespace titanium
