// What a service refuses, and how a client's time with it ends.
#include <unistd.h>

#include <stdexcept>

#include "titanium/serve/test_client.h"

namespace titanium {
namespace {

std::vector<std::string> all_methods() {
  return {"create",
          "attach",
          "initialize",
          "set_total_training_steps",
          "enter_mode",
          "exit_mode",
          "optimizer_zero_grad",
          "optimizer_step",
          "lr_scheduler_step",
          "set_param_groups",
          "forward_backward_batch",
          "forward_step",
          "train_batch",
          "infer_batch",
          "weights_begin",
          "weights_next",
          "weights_end",
          "to",
          "save_checkpoint",
          "load_checkpoint",
          "enter_disable_adapter",
          "exit_disable_adapter",
          "close"};
}

// One right call of each method that needs an engine that is initialized.
std::vector<Message> right_calls() {
  const Json sft = {{"loss", {{"name", "sft"}}}};
  return {method("enter_mode", {{"mode", "eval"}}),
          method("optimizer_zero_grad"),
          method("optimizer_step"),
          method("lr_scheduler_step"),
          with_batch("forward_backward_batch", four_rows(), sft),
          with_batch("forward_step", four_rows()),
          with_batch("train_batch", four_rows(), sft),
          with_batch("infer_batch", four_rows()),
          method("weights_begin"),
          method("save_checkpoint", {{"local_path", "/nowhere/at/all"}})};
}

void expect_refused(TestClient& client, const Message& call, const std::string& kind,
                    const std::string& text) {
  const std::string refusal = client.refusal(call);
  EXPECT_TRUE(refusal.starts_with(kind + ": ")) << call.name << " " << call.body.dump() << " -> " << refusal;
  EXPECT_NE(refusal.find(text), std::string::npos)
      << call.name << " " << call.body.dump() << " -> " << refusal;
}

TEST(ServiceRefusals, BeforeThereIsAnEngine) {
  TestService served;
  TestClient client(served.service);
  for (const Message& call : right_calls()) expect_refused(client, call, "BadConfig", "call create first");
  for (const char* name : {"attach", "initialize", "exit_mode", "enter_disable_adapter"})
    expect_refused(client, method(name), "BadConfig", "call create first");
  expect_refused(client, method("weights_next", {{"stream", 1}}), "BadConfig", "has ended");
  for (const auto& [args, text] : std::initializer_list<std::pair<Json, const char*>>{
           {Json::object(), "'config' is missing"},
           {{{"config", 3}}, "config"},
           {{{"config", {{"engin", Json::object()}}}}, "engin"},
           {{{"config", engine_json("llama3")}, {"model_type", "poem_model"}}, "poem_model"},
           {{{"config", engine_json("llama3")}, {"backend", 7}}, "'backend' is 7, expected a string"},
           {{{"config", engine_json("llama3")}, {"device", "abacus"}}, "abacus"}}) {
    expect_refused(client, method("create", args), "BadConfig", text);
  }
  expect_refused(client, method("attach"), "BadConfig", "call create first");
}

TEST(ServiceRefusals, BeforeInitialize) {
  TestService served;
  TestClient client(served.service);
  client.reply(create_call());
  for (const Message& call : right_calls()) expect_refused(client, call, "BadConfig", "before initialize()");
  client.reply(method("initialize"));
  expect_refused(client, method("initialize"), "BadConfig", "twice");
  expect_refused(client, method("set_total_training_steps", {{"steps", 5}}), "BadConfig",
                 "after initialize()");
  for (const Message& call : right_calls())
    if (call.name != "save_checkpoint") client.reply(call);
  client.reply(method("weights_end", {{"stream", 1}}));
  // A config that is refused leaves the engine that is there.
  expect_refused(client, method("create", {{"config", {{"engin", 1}}}}), "BadConfig", "engin");
  EXPECT_EQ(client.reply(method("attach")).body.at("initialized"), true);
  client.reply(create_call());
  client.reply(method("initialize"));
}

TEST(ServiceRefusals, ModelsThatAreNotThere) {
  TestService served;
  TestClient client(served.service);
  Message create = create_call();
  create.body["config"]["model"]["path"] = "/no/such/folder";
  client.reply(create);
  const std::string refusal = client.refusal(method("initialize"));
  EXPECT_NE(refusal.find("/no/such/folder"), std::string::npos) << refusal;
  EXPECT_EQ(client.reply(method("attach")).body.at("initialized"), false);
  client.start();
}

TEST(ServiceRefusals, UnknownMethodsAndArguments) {
  TestService served;
  TestClient client(served.service);
  client.start();
  for (const char* name : {"sing", "", "Initialize", "loss", "hello"})
    expect_refused(client, method(name), "BadConfig", fmt::format("unknown method '{}'", name));
  for (const std::string& name : all_methods())
    expect_refused(client, method(name, {{"loud", true}}), "BadConfig", name + ": unknown argument 'loud'");
  client.reply(with_batch("infer_batch", four_rows()));
}

TEST(ServiceRefusals, ArgumentsOfWrongTypes) {
  TestService served;
  TestClient client(served.service);
  client.start();
  const Json group = {{"lr", 1.0}, {"betas", {0.9, 0.99}}, {"eps", 1e-8}, {"weight_decay", 0.0}};
  const auto groups = [&](const char* key, Json value) {
    Json changed = group;
    changed[key] = std::move(value);
    return Json{{"param_groups", Json::array({changed})}};
  };
  for (const auto& [name, args, text] : std::initializer_list<std::tuple<const char*, Json, const char*>>{
           {"set_total_training_steps", Json::object(), "'steps' is missing"},
           {"set_total_training_steps", {{"steps", 1.5}}, "'steps' is 1.5, expected an integer"},
           {"set_total_training_steps", {{"steps", uint64_t{1} << 63}}, "expected an integer"},
           {"enter_mode", {{"mode", 3}}, "'mode' is 3, expected a string"},
           {"enter_mode", {{"mode", "sleep"}}, "sleep"},
           {"enter_mode", {{"mode", "train"}, {"zero_grad_on_exit", 1}}, "expected true or false"},
           {"exit_mode", {{"failed", false}}, "no mode has been entered"},
           {"set_param_groups", Json::object(), "'param_groups' is missing"},
           {"set_param_groups", {{"param_groups", 3}}, "expected a list"},
           {"set_param_groups", {{"param_groups", Json::array()}}, "0 groups were given, the engine has 1"},
           {"set_param_groups", {{"param_groups", {group, group}}}, "2 groups were given"},
           {"set_param_groups", groups("lr", "fast"), "lr"},
           {"set_param_groups", groups("lr", -1), "at least 0"},
           {"set_param_groups", groups("betas", {0.9}), "betas"},
           {"set_param_groups", groups("betas", {0.9, 1.0}), "betas"},
           {"set_param_groups", groups("momentum", 1), "momentum"},
           {"weights_begin", {{"dtype", 16}}, "'dtype' is 16, expected a string"},
           {"weights_begin", {{"dtype", "int8"}}, "int8"},
           {"weights_begin", {{"dtype", "decimal"}}, "decimal"},
           {"weights_begin", {{"bucket_bytes", 0}}, "bucket_bytes"},
           {"weights_begin", {{"bucket_bytes", "many"}}, "bucket_bytes"},
           {"weights_begin", {{"keep_fp32", "all"}}, "keep_fp32"},
           {"weights_begin", {{"keep_fp32", {"no.such.weight"}}}, "no.such.weight"},
           {"weights_begin", {{"version", "new"}}, "version"},
           {"weights_begin", {{"threads", 1 << 20}}, "threads"},
           {"weights_begin", {{"threads", (int64_t{1} << 32) + 1}}, "threads"},
           {"weights_next", Json::object(), "'stream' is missing"},
           {"weights_next", {{"stream", "first"}}, "expected an integer"},
           {"weights_next", {{"stream", 9}}, "stream 9 has ended"},
           {"weights_end", {{"stream", Json::object()}}, "expected an integer"},
           {"to", Json::object(), "'device' is missing"},
           {"to", {{"device", "abacus"}}, "abacus"},
           {"to", {{"device", "cpu"}, {"model", "yes"}}, "expected true or false"},
           {"to", {{"device", "cpu"}, {"model", false}}, "gradients"},
           {"save_checkpoint", Json::object(), "'local_path' is missing"},
           {"save_checkpoint", {{"local_path", "x"}, {"global_step", -1}}, "at least 0"},
           {"save_checkpoint", {{"local_path", "x"}, {"max_ckpt_to_keep", -1}}, "at least 0"},
           {"save_checkpoint", {{"local_path", {"x"}}}, "expected a string"},
           {"save_checkpoint", {{"local_path", std::string("x\0y", 3)}}, "no NUL"},
           {"load_checkpoint", {{"local_path", std::string("x\0y", 3)}}, "no NUL"},
           {"load_checkpoint", {{"local_path", 3}}, "expected a string"},
           {"exit_disable_adapter", Json::object(), "not disabled"}}) {
    expect_refused(client, method(name, args), "BadConfig", text);
  }
  client.reply(method("enter_disable_adapter"));
  client.reply(method("exit_disable_adapter"));
  client.reply(method("to", {{"device", "cpu"}, {"optimizer", false}}));
  client.reply(with_batch("infer_batch", four_rows()));
}

TEST(ServiceRefusals, BatchesOfWrongShapesAndTypes) {
  TestService served;
  TestClient client(served.service);
  client.start();
  constexpr size_t kTokens = 30, kRows = 4;
  const auto refused = [&](const char* tensor, const auto& values, const std::string& text,
                           std::vector<int64_t> shape = {}) {
    Message call = with_batch("infer_batch", four_rows());
    std::erase_if(call.tensors, [&](const TensorView& view) { return view.name == tensor; });
    call.add(tensor, values);
    if (!shape.empty()) call.tensors.back().shape = std::move(shape);
    expect_refused(client, call, "BadData", text);
  };
  using Ints = std::vector<int64_t>;
  using Reals = std::vector<double>;
  for (const char* name : {"input_ids", "offsets"}) {
    Message call = with_batch("infer_batch", four_rows());
    std::erase_if(call.tensors, [&](const TensorView& view) { return view.name == name; });
    expect_refused(client, call, "BadData", fmt::format("'{}' is missing", name));
  }
  refused("input_ids", Reals(kTokens, 1.0), "input_ids is of dtype F64, expected integers");
  refused("input_ids", Ints(kTokens, 1), "input_ids has 2 dimensions", {5, 6});
  refused("input_ids", Ints(kTokens - 1, 1), "offsets must rise from 0 to 29");
  refused("input_ids", Ints(kTokens, 320), "320");
  refused("input_ids", Ints(kTokens, -1), "no token id");
  refused("input_ids", Ints(kTokens, int64_t{1} << 40), "no token id");
  refused("offsets", Ints{}, "offsets must rise");
  refused("offsets", Ints{0, 20, 10, 30}, "offsets must rise");
  refused("offsets", Ints{1, 30}, "offsets must rise");
  refused("offsets", Ints{0, 31}, "offsets must rise");
  refused("offsets", Ints{0, 10, 10, 30}, "empty");
  refused("offsets", Reals{0, 30}, "expected integers");
  refused("loss_mask", Ints(3, 1), "loss_mask has 3 entries, expected 30");
  refused("loss_mask", Ints(kTokens, 2), "loss_mask holds 2");
  refused("loss_mask", Reals(kTokens, 0.5), "loss_mask holds 0.5");
  refused("temperature", Reals(kRows, 0.0), "temperature");
  refused("temperature", Reals(3, 1.0), "temperature has 3 entries, expected 4");
  refused("group", Ints(5, 0), "group has 5 entries, expected 4");
  refused("group", Reals(kRows, 0.0), "expected integers");
  refused("columns.advantages", Reals{1}, "columns.advantages has 1 entries, expected 30");
  refused("seq_columns.chosen", Reals(kTokens, 1), "seq_columns.chosen has 30 entries, expected 4");
  refused("rewards", Reals(kRows, 1), "unknown tensor 'rewards'");
}

TEST(ServiceRefusals, SplitsCountsAndLosses) {
  TestService served;
  TestClient client(served.service);
  client.start();
  for (const auto& [kind, args, text] : std::initializer_list<std::tuple<const char*, Json, const char*>>{
           {"BadData", {{"micro", 2}}, "expected an object"},
           {"BadData", {{"micro", {{"rows", 1}}}}, "sequences"},
           {"BadData", {{"micro", {{"sequences", 0}}}}, "above 0"},
           {"BadData", {{"micro", {{"sequences", 3}}}}, "does not divide"},
           {"BadData", {{"micro", {{"given", 3}}}}, "list of lists"},
           {"BadData", {{"micro", {{"given", {3}}}}}, "list of lists"},
           {"BadData", {{"micro", {{"given", {{"a"}}}}}}, "a row is an integer"},
           {"BadData", {{"micro", {{"given", {{0, 1, 2}}}}}}, "sample 3"},
           {"BadData", {{"micro", {{"given", {{0, 1, 2, 3, 4}}}}}}, "sample 4"},
           {"BadData", {{"micro", {{"max_tokens", 5}}}}, "5"},
           {"BadConfig", {{"micro", {{"max_tokens", 50}, {"sequences", 2}}}}, "one of them says"},
           {"BadConfig", {{"micro", {{"sequences", 2}, {"count_divisor", 2}}}}, "a multiple of 2"},
           {"BadData", {{"micro", {{"given", Json::array()}}}}, "no micro-batch"},
           {"BadData", {{"micro", {{"max_tokens", 50}, {"count_divisor", INT64_MAX}}}}, "multiple"},
           {"BadData",
            {{"counts", {{"tokens", 100}, {"sequences", INT64_MAX}, {"untrained", INT64_MAX}}}},
            "2^53"},
           {"BadData", {{"counts", 3}}, "counts"},
           {"BadData", {{"counts", {{"tokens", -1}, {"sequences", 4}}}}, "counts.tokens"},
           {"BadData", {{"counts", {{"tokens", 1}, {"sequences", 4}}}}, "1 trained tokens"},
           {"BadConfig", {{"calculate_entropy", 1}}, "expected true or false"},
           {"BadConfig", {{"temperature", "hot"}}, "expected a number"},
           {"BadData", {{"temperature", 0.0}}, "temperature"},
           {"BadData", {{"temperature", 1e-40}}, "temperature"},
           {"BadConfig", {{"loss", "nonsense"}}, "loss"},
           {"BadConfig", {{"loss", {{"name", "nonsense"}}}}, "sft"},
           {"BadConfig", {{"loss", {{"name", "sft"}, {"clip", 1}}}}, "clip"},
           {"BadConfig", {{"loss", {{"name", "policy"}, {"clip_ratio", "some"}}}}, "clip_ratio"},
           {"BadData", {{"loss", {{"name", "policy"}}}}, "column"},
           {"BadConfig", {{"loss", {{"name", "value"}}}}, "needs the values"},
           {"BadConfig", {{"loss", {{"name", "external"}, {"clip", 1}}}}, "no settings"},
           {"BadConfig", {{"forward_only", true}}, "is of forward_backward_batch"}}) {
    expect_refused(client, with_batch("infer_batch", four_rows(), args), kind, text);
  }
  client.reply(with_batch("infer_batch", four_rows(), {{"micro", {{"max_tokens", INT64_MAX}}}}));
  expect_refused(client, with_batch("train_batch", four_rows()), "BadConfig", "a loss is needed");
  expect_refused(client, with_batch("forward_backward_batch", four_rows()), "BadConfig", "needs a loss");
  expect_refused(client, with_batch("forward_backward_batch", four_rows(), {{"forward_only", 1}}),
                 "BadConfig", "expected true or false");
  EXPECT_EQ(client.reply(method("optimizer_step")).body.at("grad_norm"), 0.0);
}

TEST(ServiceRefusals, AClientThatGoesInsideAStream) {
  TestService served;
  Json stream;
  {
    TestClient client(served.service);
    client.start();
    client.reply(method("enter_disable_adapter"));
    client.reply(method("enter_mode", {{"mode", "train"}}));
    client.reply(method("enter_mode", {{"mode", "eval"}}));
    stream = client.reply(method("weights_begin", {{"bucket_bytes", 50'000}})).body.at("stream");
    client.reply(method("weights_next", {{"stream", stream}}));
    client.send(method("weights_next", {{"stream", stream}}));  // and does not wait for the bucket
    EXPECT_EQ(client.leave(), Ending::kGone);
  }
  TestClient next(served.service);
  next.reply(with_batch("train_batch", four_rows(), {{"loss", {{"name", "sft"}}}}));  // the weights may move
  expect_refused(next, method("weights_next", {{"stream", stream}}), "BadConfig", "has ended");
  expect_refused(next, method("exit_mode"), "BadConfig", "no mode has been entered");
  expect_refused(next, method("exit_disable_adapter"), "BadConfig", "not disabled");
  EXPECT_EQ(weights_of(next).size(), 21u);
}

TEST(ServiceEndings, WithoutAWord) {
  TestService served;
  TestClient client(served.service);
  EXPECT_EQ(client.leave(), Ending::kGone);
  EXPECT_FALSE(served.service.was_called());
  TestClient half(served.service);
  ASSERT_EQ(::write(half.fd(), "titan", 5), 5);  // the beginning of a frame
  EXPECT_EQ(half.leave(), Ending::kGone);
  EXPECT_FALSE(served.service.was_called());
}

TEST(ServiceEndings, WhatIsNoCall) {
  TestService served;
  const auto expect_malformed = [&](const auto& speak) {
    TestClient client(served.service);
    speak(client);
    const Message refused = client.receive();
    EXPECT_EQ(refused.type, Message::Type::kError);
    EXPECT_EQ(refused.name, "BadData");
    EXPECT_EQ(refused.id, 0);
    EXPECT_THROW(client.receive(), PeerGone);
    EXPECT_EQ(client.leave(), Ending::kMalformed);
  };
  expect_malformed([](TestClient& client) { client.send(Message::reply_to(method("loss"))); });
  expect_malformed([](TestClient& client) { client.send(Message::error_to(1, "BadData", "no")); });
  expect_malformed([](TestClient& client) {
    const std::string text = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
    ASSERT_EQ(::write(client.fd(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
  });
  expect_malformed([](TestClient& client) {  // a frame whose blob is no safetensors file
    const auto frame = encode_frame({0, 16});
    const std::string blob(16, '\xff');
    ASSERT_EQ(::write(client.fd(), frame.data(), frame.size()), static_cast<ssize_t>(frame.size()));
    ASSERT_EQ(::write(client.fd(), blob.data(), blob.size()), static_cast<ssize_t>(blob.size()));
  });
  TestClient next(served.service);
  next.start();
}

TEST(ServiceEndings, AFailureOfOursEndsIt) {
  const auto failing = [](const auto& fail, ErrorKind kind) {
    TestService served;
    served.registry.register_engine(
        "language_model", {"broken"}, {"cpu"},
        [fail](const EngineConfig&, Log&, std::shared_ptr<World>) -> std::unique_ptr<BaseEngine> {
          fail();
          return nullptr;
        });
    TestClient client(served.service);
    Message create = create_call();
    create.body["backend"] = "broken";
    EXPECT_EQ(client.refusal(create), fmt::format("{}: mine", name(kind)));
    EXPECT_THROW(client.receive(), PeerGone);
    EXPECT_EQ(client.leave(), Ending::kFailed);
    EXPECT_EQ(served.service.failure(), kind);
  };
  failing([] { throw Bug("mine"); }, ErrorKind::kBug);
  failing([] { throw std::runtime_error("mine"); }, ErrorKind::kBug);
  failing([] { throw RankLost("mine"); }, ErrorKind::kRankLost);
}

}  // namespace
}  // namespace titanium
