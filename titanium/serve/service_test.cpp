#include "titanium/serve/service.h"

#include <ATen/ATen.h>

#include <map>
#include <string>

#include "titanium/dist/run_ranks.h"
#include "titanium/formats/safetensors.h"
#include "titanium/loss/policy_loss.h"
#include "titanium/serve/test_client.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/sync_wire.h"

namespace titanium {
namespace {

// Everything in the reply, to the bit; and nothing else is in it.
void expect_output(const Message& reply, const EngineOutput& expected) {
  size_t tensors = 1;  // "loss"
  for (const auto& [name, rows] : expected.model_output) {
    EXPECT_EQ(read_numbers(reply.at("model_output." + name)), numbers(rows.values)) << name;
    EXPECT_EQ(read_integers(reply, "offsets"), rows.offsets);
    ++tensors;
  }
  EXPECT_EQ(reply.tensors.size(), tensors + !expected.model_output.empty());
  EXPECT_EQ(read_numbers(reply.at("loss")), expected.loss);
  EXPECT_EQ(reply.body.at("metrics"), reports_json(expected.metrics));
}

std::map<std::string, std::string> exported(TestEngine& engine, const SyncOptions& options) {
  std::map<std::string, std::string> weights;
  auto [stream, adapter] = engine->get_per_tensor_param(options);
  while (const auto item = stream.next()) {
    const at::Tensor tensor = item->tensor.contiguous();
    weights[item->name] = {static_cast<const char*>(tensor.data_ptr()), tensor.nbytes()};
  }
  return weights;
}

TEST(Service, SaysWhoItIsAndWhatItHas) {
  TestService served;
  {
    TestClient client(served.service);
    EXPECT_EQ(client.hello.type, Message::Type::kReply);
    EXPECT_EQ(client.hello.name, "hello");
    EXPECT_EQ(client.hello.id, 0);
    EXPECT_EQ(client.hello.body.at("protocol"), kWireVersion);
    EXPECT_EQ(client.hello.body.at("created"), false);
    const Message created = client.reply(create_call());
    const Json facts = {{"rank", 0},
                        {"world_size", 1},
                        {"data_parallel_rank", 0},
                        {"data_parallel_size", 1},
                        {"is_mp_src_rank_with_outputs", true},
                        {"is_param_offload_enabled", false},
                        {"is_optimizer_offload_enabled", false}};
    EXPECT_EQ(created.body, facts);
    Message attached = client.reply(method("attach"));
    EXPECT_EQ(attached.body.at("facts"), facts);
    EXPECT_EQ(attached.body.at("initialized"), false);
    EXPECT_EQ(attached.body.at("made_with").at("config"), engine_json("llama3"));
    EXPECT_EQ(attached.body.at("made_with").at("model_type"), "language_model");
    const Message initialized = client.reply(method("initialize"));
    attached = client.reply(method("attach"));
    EXPECT_EQ(attached.body.at("initialized"), true);
    EXPECT_EQ(attached.body.at("param_groups"), initialized.body.at("param_groups"));
    EXPECT_EQ(initialized.body.at("param_groups").at(0).at("lr"), 1e-3);
    client.reply(method("close"));
    EXPECT_EQ(client.leave(), Ending::kClosed);
  }
  TestClient next(served.service);
  EXPECT_EQ(next.hello.body.at("created"), true) << "the engine stays";
  EXPECT_EQ(next.reply(method("attach")).body.at("initialized"), true);
  next.reply(create_call("qwen3"));  // another one in its place
  EXPECT_EQ(next.reply(method("attach")).body.at("initialized"), false);
}

TEST(Service, InferAndTrainAreThoseOfTheEngine) {
  TestService served;
  TestClient client(served.service);
  client.start();
  TestEngine engine(engine_json("llama3"));
  EngineBatch batch = four_rows();
  batch.calculate_entropy = batch.calculate_sum_pi_squared = true;
  batch.temperature = 0.7;
  batch.micro.given = {{3, 0}, {1, 2}};
  const Json asked = {{"calculate_entropy", true},
                      {"calculate_sum_pi_squared", true},
                      {"temperature", 0.7},
                      {"micro", {{"given", {{3, 0}, {1, 2}}}}}};
  const EngineOutput expected = engine->infer_batch(batch);
  ASSERT_EQ(expected.model_output.size(), 3u);
  expect_output(client.reply(with_batch("infer_batch", batch, asked)), expected);
  expect_output(client.reply(with_batch("forward_step", batch, asked)), engine->forward_step(batch));

  // An update of every kind, and what it leaves in the weights.
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    for (int64_t t = 0; t < batch.samples[i].size(); ++t) {
      batch.samples[i].columns["old_log_probs"].push_back(-5.0 - 0.1 * static_cast<double>(t));
      batch.samples[i].columns["advantages"].push_back(i % 2 ? 1.0 : -0.5);
    }
  }
  batch.calculate_entropy = batch.calculate_sum_pi_squared = false;
  const Json split = {{"temperature", 0.7}, {"micro", asked.at("micro")}};
  Json args = split;
  args["loss"] = {{"name", "policy"}, {"clip_ratio", 0.1}};
  PolicyLossConfig settings;
  settings.clip_ratio = 0.1;
  client.reply(method("enter_mode", {{"mode", "train"}}));
  engine->enter_mode(Mode::kTrain, {});
  const Message trained = client.reply(with_batch("train_batch", batch, args));
  expect_output(trained, engine->train_batch(batch, PolicyLoss(settings)));
  EXPECT_GT(trained.body.at("metrics").at("grad_norm").at("value"), 0);

  args["loss"] = {{"name", "sft"}};
  args["return_model_output"] = true;
  batch.return_model_output = true;
  args["counts"] = {{"tokens", 100}, {"sequences", 8}};
  batch.counts = Counts{.tokens = 100, .sequences = 8};
  const SftLoss sft;
  for (int part = 0; part < 2; ++part) {  // gradients add up
    expect_output(client.reply(with_batch("forward_backward_batch", batch, args)),
                  engine->forward_backward_batch(batch, &sft, false));
  }
  EXPECT_EQ(client.reply(method("optimizer_step")).body.at("grad_norm"), engine->optimizer_step());
  const Message rate = client.reply(method("lr_scheduler_step"));
  EXPECT_EQ(rate.body.at("lr"), engine->lr_scheduler_step());
  EXPECT_EQ(rate.body.at("param_groups"), param_groups_json(engine->param_groups()));
  client.reply(method("optimizer_zero_grad"));
  EXPECT_EQ(client.reply(method("optimizer_step")).body.at("grad_norm"), 0.0) << "nothing to do";
  client.reply(method("exit_mode"));
  engine->exit_mode(false);

  args["forward_only"] = true;
  expect_output(client.reply(with_batch("forward_backward_batch", batch, args)),
                engine->forward_backward_batch(batch, &sft, true));
  EXPECT_EQ(weights_of(client, "master"), exported(engine, {.dtype = {}}));
  EXPECT_EQ(weights_of(client, "bfloat16"), exported(engine, {}));
}

TEST(Service, AValueModelAndRowsOfMoreKinds) {
  TestService served;
  TestClient client(served.service);
  Message create = create_call();
  create.body["model_type"] = "value_model";
  client.reply(create);
  client.reply(method("initialize"));
  TestEngine engine(engine_json("llama3"), "value_model");
  EngineBatch batch = four_rows();
  Message call = with_batch("infer_batch", batch);
  call.add("temperature", std::vector<double>{0.5, 1, 2, 1.5});
  call.add("group", std::vector<int64_t>{0, 0, 1, 1});
  call.add("seq_columns.chosen", std::vector<double>{1, 0, 0, 1});
  const EngineOutput expected = engine->infer_batch(batch);
  ASSERT_TRUE(expected.model_output.contains("values"));
  expect_output(client.reply(call), expected);
}

TEST(Service, WhatIsWrittenIntoParamGroupsHolds) {
  TestService served;
  TestClient client(served.service);
  client.reply(create_call());
  client.reply(method("set_total_training_steps", {{"steps", 7}}));
  Json groups = client.reply(method("initialize")).body.at("param_groups");
  groups[0]["lr"] = 0.0;
  groups[0]["betas"] = {0.8, 0.9};
  client.reply(method("set_param_groups", {{"param_groups", groups}}));
  EXPECT_EQ(client.reply(method("attach")).body.at("param_groups"), groups);
  const auto before = weights_of(client);
  client.reply(with_batch("train_batch", four_rows(), {{"loss", {{"name", "sft"}}}}));
  EXPECT_EQ(weights_of(client), before) << "a rate of 0 changes nothing";
  groups[0]["lr"] = 0.1;
  client.reply(method("set_param_groups", {{"param_groups", groups}}));
  client.reply(with_batch("train_batch", four_rows(), {{"loss", {{"name", "sft"}}}}));
  EXPECT_NE(weights_of(client), before);
}

TEST(Service, WeightsComeBucketByBucket) {
  TestService served;
  TestClient client(served.service);
  client.start();
  const SafetensorsFile file(model_folder("llama3") + "/model.safetensors");
  constexpr uint64_t kBucket = 100'000;
  const Message begun = client.reply(method(
      "weights_begin", {{"dtype", "master"}, {"bucket_bytes", kBucket}, {"version", 41}, {"threads", 1}}));
  EXPECT_EQ(begun.body.at("version"), 41);
  EXPECT_TRUE(begun.body.at("adapter").is_null());
  EXPECT_EQ(begun.body.at("checksums"), true);
  const Json& specs = begun.body.at("tensors");
  ASSERT_EQ(specs.size(), file.tensors().size());
  ASSERT_GT(begun.body.at("buckets"), 3);

  const Message next = method("weights_next", {{"stream", begun.body.at("stream")}});
  std::vector<TensorSpec> seen;
  std::vector<uint64_t> hashes;
  uint64_t bytes = 0;
  for (int64_t index = 0; index < begun.body.at("buckets"); ++index) {
    const Message bucket = client.reply(next);
    ASSERT_EQ(bucket.body.at("end"), false);
    EXPECT_EQ(bucket.body.at("index"), index);
    EXPECT_EQ(bucket.body.at("names").size(), bucket.tensors.size());
    uint64_t size = 0;
    for (const Json& name : bucket.body.at("names")) {
      const TensorView& view = bucket.at(name.get<std::string>());
      EXPECT_EQ(specs[seen.size()], Json({view.name, titanium::name(view.dtype), view.shape}));
      EXPECT_EQ(view.shape, file.at(view.name).shape);
      EXPECT_EQ(bytes_of(view), bytes_of(file.at(view.name))) << view.name;
      seen.push_back({view.name, view.dtype, view.shape});
      hashes.push_back(tree_hash({view.data, view.nbytes}));
      EXPECT_EQ(bucket.body.at("checksums").at(view.name), to_hex(hashes.back()));
      size += view.nbytes;
    }
    EXPECT_TRUE(size <= kBucket || bucket.tensors.size() == 1) << size;
    bytes += size;
    // Forwards and backwards may go on meanwhile; whatever writes weights may not.
    client.reply(with_batch("infer_batch", four_rows()));
    client.reply(with_batch("forward_backward_batch", four_rows(), {{"loss", {{"name", "sft"}}}}));
    EXPECT_TRUE(client.refusal(method("optimizer_step")).starts_with("BadConfig: "));
  }
  EXPECT_EQ(seen.size(), specs.size());
  EXPECT_EQ(bytes, begun.body.at("bytes").get<uint64_t>());
  const Message end = client.reply(next);
  EXPECT_EQ(end.body, Json({{"end", true}, {"checksum", to_hex(total_checksum(seen, hashes))}}));
  EXPECT_TRUE(end.tensors.empty());
  EXPECT_NE(client.refusal(next).find("has ended"), std::string::npos);
  EXPECT_GT(client.reply(method("optimizer_step")).body.at("grad_norm"), 0);
}

TEST(Service, OneStreamAtATime) {
  TestService served;
  TestClient client(served.service);
  client.start();
  const Message begin = method("weights_begin", {{"bucket_bytes", 50'000}});
  const Json first = client.reply(begin).body, second = client.reply(begin).body;
  EXPECT_EQ(second.at("version"), first.at("version").get<int64_t>() + 1);
  EXPECT_NE(client.refusal(method("weights_next", {{"stream", first.at("stream")}})).find("has ended"),
            std::string::npos);
  client.reply(method("weights_end", {{"stream", first.at("stream")}}));  // ends nothing any more
  const Message bucket = client.reply(method("weights_next", {{"stream", second.at("stream")}}));
  EXPECT_EQ(bucket.tensors.at(0).dtype, Dtype::BF16);
  client.reply(method("weights_end", {{"stream", second.at("stream")}}));
  client.reply(method("weights_end", {{"stream", second.at("stream")}}));
  client.reply(with_batch("train_batch", four_rows(), {{"loss", {{"name", "sft"}}}}));  // they move again
}

TEST(Service, ACheckpointIsTheWayBack) {
  const TestFolder folder;
  const auto step = [&](int64_t n) { return (folder.path / fmt::format("global_step_{}", n)).string(); };
  TestService served;
  TestClient client(served.service);
  client.start();
  const auto train = [&](TestClient& with) {
    return with.reply(with_batch("train_batch", four_rows(), {{"loss", {{"name", "sft"}}}})).body;
  };
  train(client);
  client.reply(method("lr_scheduler_step"));
  Json groups = client.reply(method("attach")).body.at("param_groups");
  groups[0]["lr"] = 5e-3;
  client.reply(method("set_param_groups", {{"param_groups", groups}}));
  client.reply(method("save_checkpoint", {{"local_path", step(1)}, {"global_step", 1}}));
  const auto saved = weights_of(client);
  const Json straight = train(client);
  const auto after = weights_of(client);
  EXPECT_NE(saved, after);

  TestService other;  // a process that starts anew
  TestClient resumed(other.service);
  resumed.start();
  EXPECT_NE(weights_of(resumed), saved);
  EXPECT_EQ(resumed.reply(method("load_checkpoint", {{"local_path", step(1)}})).body.at("param_groups"),
            groups);
  EXPECT_EQ(weights_of(resumed), saved);
  EXPECT_EQ(train(resumed), straight);
  EXPECT_EQ(weights_of(resumed), after);

  resumed.reply(method("load_checkpoint"));  // of nothing
  EXPECT_EQ(weights_of(resumed), after);
  const std::string refusal = resumed.refusal(method("load_checkpoint", {{"local_path", step(7)}}));
  EXPECT_TRUE(refusal.starts_with("BadCheckpoint: ")) << refusal;
  EXPECT_NE(refusal.find("global_step_7"), std::string::npos) << refusal;
  EXPECT_EQ(weights_of(resumed), after) << "nothing is half-loaded";
  for (const int64_t n : {2, 3}) {
    resumed.reply(
        method("save_checkpoint", {{"local_path", step(n)}, {"global_step", n}, {"max_ckpt_to_keep", 1}}));
  }
  EXPECT_FALSE(std::filesystem::exists(step(2)));
  EXPECT_TRUE(std::filesystem::exists(step(3)));
}

// A signal cuts the connection, so that to the server's thread the client is gone.
TEST(ServiceRanks, TheOthersHearTheCauseThatIsKnownFirst) {
  for (const bool known : {true, false}) {
    std::string told;
    EXPECT_THROW(run_ranks(2,
                           [&](std::shared_ptr<World> world) {
                             TestService served([&](const CommConfig&) { return world; });
                             Message create = create_call();
                             create.body["config"]["engine"]["data_parallel_shard_size"] = 2;
                             TestClient client(served.service);
                             client.reply(create);
                             if (world->rank() == 1) {
                               if (known) served.service.will_lose("a signal asked the server to end");
                               EXPECT_EQ(client.leave(), Ending::kGone);
                               throw RankLost("rank 1 ends");
                             }
                             told = client.refusal(method("initialize"));
                           }),
                 RankLost);
    EXPECT_NE(told.find(known ? "rank 1 failed: a signal asked the server to end"
                              : "rank 1 failed: its client is gone"),
              std::string::npos)
        << told;
  }
}

}  // namespace
}  // namespace titanium
