#include "titanium/engine/engine.h"

#include <ATen/Parallel.h>

#include <cmath>
#include <fstream>
#include <limits>

#include "titanium/base/error.h"
#include "titanium/engine/test_engine.h"
#include "titanium/formats/hf_tensors.h"
#include "titanium/formats/safetensors.h"
#include "titanium/loss/policy_loss.h"
#include "titanium/loss/preference.h"
#include "titanium/loss/value_loss.h"
#include "titanium/report/memory.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

EngineBatch some() {
  return test_batch(test_samples({6, 9, 4, 11}));
}
double gradient_size(const TestEngine& engine) {
  return all_gradients(*engine).abs().max().item<double>();
}

TEST(EngineRegistry, KnowsItsTriplesAndListsThem) {
  const EngineConfig config = EngineConfig::from_json(engine_json("llama3"));
  LogOptions quiet;
  quiet.level = LogLevel::kOff;
  Log log(quiet);
  EngineRegistry registry;
  for (const char* backend : {"titanium", "torchtitan"}) {
    EXPECT_TRUE(dynamic_cast<TitanEngineWithLMHead*>(
        registry.create("language_model", backend, "cpu", config, log).get()));
    EXPECT_TRUE(dynamic_cast<TitanEngineWithValueHead*>(
        registry.create("value_model", backend, "cpu", config, log).get()));
  }
  EXPECT_EQ(
      message_of<BadConfig>([&] { registry.create("language_model", "fsdp", "cpu", config, log); }),
      "there is no engine (model_type language_model, backend fsdp, device cpu); there are: (language_model, "
      "titanium, cpu), (language_model, torchtitan, cpu), (value_model, titanium, cpu), (value_model, "
      "torchtitan, cpu)");
  const EngineRegistry::Factory factory = registry.get_engine_cls("language_model", "titanium", "cpu");
  registry.register_engine("language_model", {"mine"}, {"cpu", "npu"}, factory);
  EXPECT_TRUE(registry.create("language_model", "mine", "npu", config, log));
  EXPECT_THROW(registry.register_engine("language_model", {"mine"}, {"npu"}, factory), Bug);
  EXPECT_THROW(EngineRegistry().get_engine_cls("language_model", "mine", "npu"), BadConfig);
}

TEST(Engine, AnswersWhatItCanBeforeInitialize) {
  TestEngine engine(engine_json("llama3"), "language_model", /*initialize=*/false);
  EXPECT_EQ(engine->get_data_parallel_rank(), 0);
  EXPECT_EQ(engine->get_data_parallel_size(), 1);
  EXPECT_EQ(engine->get_data_parallel_group().size(), 1);
  EXPECT_TRUE(engine->is_mp_src_rank_with_outputs());
  EXPECT_EQ(message_of<BadConfig>([&] { engine->infer_batch(some()); }),
            "forward_backward_batch before initialize()");
  EXPECT_THROW(engine->optimizer_step(), BadConfig);
  EXPECT_THROW(engine->train_mode(), BadConfig);
  EXPECT_THROW(engine->save_checkpoint("/nowhere", 0, 0), BadConfig);
  EXPECT_THROW(engine->get_per_tensor_param({}), BadConfig);
  engine->initialize();
  EXPECT_THROW(engine->initialize(), BadConfig);
  EXPECT_THROW(engine->set_total_training_steps(5), BadConfig);
  Json two = engine_json("llama3");
  two["engine"]["tensor_parallel_size"] = 2;
  EXPECT_THROW(TestEngine(two, "language_model", false), BadConfig);
}

TEST(Engine, TheScheduleIsMadeOfTheTotalThatComesLast) {
  Json json = engine_json("llama3");
  json["optimizer"] = Json::parse(R"({"lr": 0.5, "lr_scheduler_type": "cosine", "lr_warmup_steps": 2})");
  TestEngine early(json, "language_model", false);
  EXPECT_THROW(early->initialize(), BadConfig);
  early->set_total_training_steps(10);
  early->initialize();  // the failed call has left nothing behind
  EXPECT_EQ(early->param_groups()[0].lr, 0);
  EXPECT_EQ(early->lr_scheduler_step(), 0.25);
  EXPECT_EQ(early->lr_scheduler_step(), 0.5);
  EXPECT_NEAR(early->lr_scheduler_step(), 0.25 * (1 + std::cos(M_PI / 8)), 1e-12);
}

TEST(Engine, ModesNestAndGradientsLiveAsTheOptionsSay) {
  TestEngine engine(engine_json("llama3"));
  const SftLoss loss;
  EXPECT_EQ(engine->mode(), Mode::kNone);
  {
    auto outer = engine->train_mode({.zero_grad_on_exit = false});
    engine->forward_backward_batch(some(), &loss, false);
    {
      auto inner = engine->eval_mode({.disable_auto_offload = true});
      EXPECT_EQ(engine->mode(), Mode::kEval);
      engine->infer_batch(some());
    }
    EXPECT_EQ(engine->mode(), Mode::kTrain);
  }
  EXPECT_EQ(engine->mode(), Mode::kNone);
  EXPECT_GT(gradient_size(engine), 0);  // they survive to the next scope
  const at::Tensor once = all_gradients(*engine).clone();
  {
    auto scope = engine->train_mode();
    engine->forward_backward_batch(some(), &loss, false);
    EXPECT_TRUE(at::allclose(all_gradients(*engine), once * 2, 1e-5, 1e-6));
  }
  EXPECT_EQ(gradient_size(engine), 0);
  EXPECT_THROW(engine->exit_mode(false), Bug);
}

TEST(Engine, AnExceptionInsideAScopeLeavesItUsable) {
  TestEngine engine(engine_json("llama3")), other(engine_json("llama3"));
  const SftLoss loss;
  const ExternalLoss fails([](const TokenStats&, const PackedBatch&) -> ExternalAnswer {
    throw std::runtime_error("the caller's own");
  });
  EXPECT_THROW(
      {
        auto scope = engine->train_mode({.zero_grad_on_exit = false});
        engine->forward_backward_batch(some(), &loss, false);
        throw std::runtime_error("between two calls");
      },
      std::runtime_error);
  EXPECT_EQ(engine->mode(), Mode::kNone);
  EXPECT_EQ(gradient_size(engine), 0);
  {
    auto scope = engine->train_mode({.zero_grad_on_exit = false});
    engine->forward_backward_batch(some(), &loss, false);
    EXPECT_THROW(engine->forward_backward_batch(some(), &fails, false), std::runtime_error);
    EXPECT_EQ(gradient_size(engine), 0);  // half a sum would be of no use
    EXPECT_THROW(engine->infer_batch(some(), &fails), std::runtime_error);
  }
  engine->train_batch(some(), loss);
  other->train_batch(some(), loss);
  EXPECT_TRUE(all_masters(*engine).equal(all_masters(*other)));
}

TEST(Engine, TrainBatchIsItsPartsAndLeavesZeroedGradients) {
  TestEngine whole(engine_json("llama3")), parts(engine_json("llama3"));
  const SftLoss loss;
  for (int step = 0; step < 3; ++step) {
    const EngineOutput out = whole->train_batch(some(), loss);
    EXPECT_EQ(gradient_size(whole), 0);
    parts->optimizer_zero_grad();
    const EngineOutput same = parts->forward_backward_batch(some(), &loss, false);
    const double norm = parts->optimizer_step();
    EXPECT_GT(gradient_size(parts), 0);  // until they are zeroed
    EXPECT_EQ(out.metrics.at("grad_norm").value(), norm);
    EXPECT_EQ(out.loss, same.loss);
    EXPECT_EQ(whole->lr_scheduler_step(), parts->lr_scheduler_step());
  }
  EXPECT_TRUE(all_masters(*whole).equal(all_masters(*parts)));
}

TEST(Engine, TheNormIsThatBeforeClipping) {
  Json json = engine_json("llama3");
  json["optimizer"]["clip_grad"] = 1e-3;
  TestEngine engine(json);
  const SftLoss loss;
  engine->forward_backward_batch(some(), &loss, false);
  const double want = all_gradients(*engine).norm().item<double>();
  EXPECT_GT(want, 0.01);
  EXPECT_NEAR(engine->optimizer_step(), want, 1e-6 * want);
}

TEST(Engine, AnUpdateWithoutABackwardIsNone) {
  TestEngine engine(engine_json("llama3"));
  const at::Tensor before = all_masters(*engine).clone();
  EXPECT_EQ(engine->optimizer_step(), 0);
  EXPECT_TRUE(all_masters(*engine).equal(before));  // no weight decay either
  EXPECT_THROW(engine->forward_backward_batch(some(), nullptr, false), BadConfig);
}

TEST(Engine, ANonFiniteNormSkipsTheUpdateAndNamesTheParameters) {
  TestEngine engine(engine_json("llama3"));
  const at::Tensor before = all_masters(*engine).clone();
  const ExternalLoss bad([](const TokenStats& now, const PackedBatch&) {
    return ExternalAnswer{
        1, {at::full_like(now.logprob, std::numeric_limits<double>::infinity()), {}, {}, {}}, {}};
  });
  engine->forward_backward_batch(some(), &bad, false);
  EXPECT_FALSE(std::isfinite(engine->optimizer_step()));
  EXPECT_TRUE(all_masters(*engine).equal(before));
  EXPECT_EQ(gradient_size(engine), 0);
  EXPECT_TRUE(engine.logged("gradient norm"));
  EXPECT_TRUE(engine.logged("model.embed_tokens.weight"));
  EXPECT_TRUE(engine.logged("the update is skipped"));
  TestEngine other(engine_json("llama3"));
  engine->train_batch(some(), SftLoss());
  other->train_batch(some(), SftLoss());
  EXPECT_TRUE(all_masters(*engine).equal(all_masters(*other)));  // Adam has not counted the skipped one
}

TEST(Engine, WritesToParamGroupsHoldFromTheNextStep) {
  TestEngine engine(engine_json("llama3"));
  Json json = engine_json("llama3");
  json["optimizer"] = Json::parse(R"({"lr": 0.003, "weight_decay": 0.5, "betas": [0.8, 0.9], "eps": 1e-4})");
  TestEngine other(json);
  const SftLoss loss;
  engine->param_groups()[0] = {.lr = 0.003, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-4, .weight_decay = 0.5};
  engine->train_batch(some(), loss);
  other->train_batch(some(), loss);
  EXPECT_TRUE(all_masters(*engine).equal(all_masters(*other)));
  EXPECT_EQ(engine->lr_scheduler_step(), 1e-3);  // the schedule writes lr again
  EXPECT_EQ(engine->param_groups()[0].lr, 1e-3);
  EXPECT_EQ(engine->param_groups()[0].weight_decay, 0.5);

  engine->param_groups()[0].beta1 = 1;
  EXPECT_THROW(engine->train_batch(some(), loss), BadConfig);
  engine->param_groups()[0].beta1 = 0.8;
  engine->param_groups()[0].lr = std::nan("");
  EXPECT_THROW(engine->train_batch(some(), loss), BadConfig);
  engine->param_groups().clear();
  EXPECT_THROW(engine->train_batch(some(), loss), BadConfig);
}

TEST(Engine, ForwardOnlyHasNoOptimizer) {
  Json json = engine_json("llama3");
  json["engine"]["forward_only"] = true;
  json["optimizer"]["lr_scheduler_type"] = "cosine";  // without a total: nobody needs it
  TestEngine engine(json);
  const SftLoss loss;
  EXPECT_EQ(engine->infer_batch(some(), &loss).model_output.at("log_probs").rows(), 4);
  EXPECT_THROW(engine->train_batch(some(), loss), BadConfig);
  EXPECT_THROW(engine->optimizer_step(), BadConfig);
  EXPECT_THROW(engine->lr_scheduler_step(), BadConfig);
  EXPECT_NO_THROW(engine->optimizer_zero_grad());
}

TEST(Engine, FrozenWeightsStayAndTheOthersTrainAsBefore) {
  Json json = engine_json("llama3");
  json["model"]["freeze"] = Json::parse(R"(["model.embed_tokens.*", "lm_head.weight", "*.q_proj.weight"])");
  TestEngine frozen(json), free(engine_json("llama3"));
  const SftLoss loss;
  for (TestEngine* engine : {&frozen, &free}) (*engine)->forward_backward_batch(some(), &loss, false);
  const auto of = [](const TestEngine& engine, const std::string& name, bool gradient) {
    const Weight& weight = engine->session().store->weight(name);
    const at::Tensor flat = gradient ? weight.unit().grad_shard() : weight.unit().shard();
    return flat.defined() ? flat.narrow(0, weight.offset(), weight.numel()).clone() : at::Tensor();
  };
  EXPECT_FALSE(of(frozen, "lm_head.weight", true).defined());
  for (const char* name :
       {"model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"})
    EXPECT_TRUE(at::allclose(of(frozen, name, true), of(free, name, true), 1e-5, 1e-7)) << name;
  const at::Tensor q = of(frozen, "model.layers.1.self_attn.q_proj.weight", false);
  const at::Tensor k = of(frozen, "model.layers.1.self_attn.k_proj.weight", false);
  frozen->optimizer_step();
  EXPECT_TRUE(of(frozen, "model.layers.1.self_attn.q_proj.weight", false).equal(q));
  EXPECT_FALSE(of(frozen, "model.layers.1.self_attn.k_proj.weight", false).equal(k));

  json["model"]["freeze"] = "lm_hed.weight";
  EXPECT_EQ(message_of<BadConfig>([&] { TestEngine{json}; }),
            "model.freeze = 'lm_hed.weight' fits no weight of the model; did you mean 'lm_head.weight'?");
  json["model"]["freeze"] = "*";
  EXPECT_EQ(message_of<BadConfig>([&] { TestEngine{json}; }),
            "model.freeze: every weight is frozen, so there is nothing to train");
}

TEST(Engine, OffloadGivesBackWhatItCanAndChangesNothing) {
  Json json = engine_json("llama3", "bfloat16");
  TestEngine stays(json);
  json["engine"]["param_offload"] = json["engine"]["optimizer_offload"] = true;
  TestEngine leaves(json);
  EXPECT_TRUE(leaves->is_param_offload_enabled() && leaves->is_optimizer_offload_enabled());
  EXPECT_FALSE(stays->is_param_offload_enabled());
  const SftLoss loss;
  const auto has_gradients = [&] {
    for (const auto& unit : leaves->session().store->units())
      if (unit->has_grad()) return true;
    return false;
  };
  const auto has_casts = [](const TestEngine& engine) {
    for (const auto& unit : engine->session().store->units())
      if (unit->current().defined()) return true;
    return false;
  };
  EXPECT_FALSE(has_casts(leaves));
  for (int step = 0; step < 3; ++step) {
    for (TestEngine* engine : {&stays, &leaves}) {
      auto scope = (*engine)->train_mode();
      auto inner = (*engine)->train_mode({.disable_auto_offload = true, .zero_grad_on_exit = false});
      (*engine)->train_batch(some(), loss);
      auto eval = (*engine)->eval_mode();
      (*engine)->infer_batch(some());
    }
    EXPECT_FALSE(has_gradients());
    EXPECT_FALSE(has_casts(leaves));
    EXPECT_TRUE(has_casts(stays));
  }
  stays.engine->to("cpu");
  EXPECT_FALSE(has_casts(stays));
  {
    auto scope = leaves->train_mode({.zero_grad_on_exit = false});
    leaves->forward_backward_batch(some(), &loss, false);
  }
  EXPECT_TRUE(has_gradients());  // what is not zero stays
  leaves->optimizer_zero_grad();
  leaves.engine->to("cpu");
  leaves.engine->to("cpu");
  EXPECT_FALSE(has_gradients());
  leaves->to("cpu", true, false, false);
  EXPECT_TRUE(all_masters(*stays).equal(all_masters(*leaves)));
  EXPECT_THROW(leaves->to("cpu", false, true, true), BadConfig);
  EXPECT_THROW(leaves.engine->to("cuda"), BadConfig);
  leaves->train_batch(some(), loss);
  stays->train_batch(some(), loss);
  EXPECT_TRUE(all_masters(*stays).equal(all_masters(*leaves)));
}

TEST(Engine, MemoryDoesNotGrowOverFiveHundredCycles) {
  Json json = engine_json("llama3", "bfloat16");
  json["engine"]["param_offload"] = json["engine"]["optimizer_offload"] = true;
  TestEngine engine(json);
  const SftLoss loss;
  const EngineBatch batch = test_batch(test_samples({6, 9}));
  const auto cycle = [&] {
    {
      auto scope = engine->train_mode();
      engine->train_batch(batch, loss);
    }
    auto scope = engine->eval_mode();
    engine->infer_batch(batch);
  };
  const int threads = at::get_num_threads();
  at::set_num_threads(1);  // so small a model gains nothing from more, and a busy machine makes them wait
  for (int i = 0; i < 100; ++i) cycle();
  const uint64_t before = rss_bytes();
  for (int i = 0; i < 500; ++i) cycle();
  const uint64_t after = rss_bytes();
  at::set_num_threads(threads);
  EXPECT_LT(after, before + (1 << 20)) << before << " bytes before, " << after << " after";
}

// A value model: a loss by the values, (v - 1)^2 / 2 at trained positions.
ExternalLoss towards_one() {
  return ExternalLoss([](const TokenStats& now, const PackedBatch& batch) {
    const at::Tensor weight = at::tensor(at::ArrayRef<double>(batch.weight), at::kDouble);
    const at::Tensor off = now.value.to(at::kDouble) - 1;
    ExternalAnswer answer;
    answer.loss = (weight * off * off / 2).sum().item<double>();
    answer.gradient.value = (weight * off).to(now.value.scalar_type());
    return answer;
  });
}

TEST(ValueEngine, StartsFromALanguageModelWithALogLine) {
  for (const char* model : {"llama3", "qwen3_tied"}) {
    TestEngine engine(engine_json(model), "value_model");
    EXPECT_TRUE(engine.logged("has no score.weight: it starts random, of the seed 42")) << model;
    EXPECT_TRUE(engine.logged("has no score.bias: it starts at zero")) << model;
    const at::Tensor weight = engine->session().store->weight("score.weight").unit().shard();
    TestEngine again(engine_json(model), "value_model");
    EXPECT_TRUE(all_masters(*engine).equal(all_masters(*again)));

    EngineBatch batch = some();
    batch.micro.max_tokens = 12;
    const EngineOutput out = engine->infer_batch(batch);
    ASSERT_EQ(out.model_output.size(), 1u);
    const Jagged values = out.model_output.at("values");
    ASSERT_EQ(values.rows(), 4);
    for (int64_t i = 0; i < 4; ++i) {
      const at::Tensor alone = engine->forward_step(test_batch({batch.samples[static_cast<size_t>(i)]}))
                                   .model_output.at("values")
                                   .row(0);
      EXPECT_LT((values.row(i) - alone).abs().max().item<double>(), 1e-5);
      EXPECT_NE(values.row(i)[-1].item<float>(), 0);  // the value after the last token
    }
  }
}

// The reward of a whole answer stands after its last token, in training as in a forward.
TEST(ValueEngine, ALossOfTheCallersOwnHasTheValueAfterTheLastToken) {
  TestEngine engine(engine_json("llama3"), "value_model");
  std::vector<double> rewards;
  const ExternalLoss loss([&](const TokenStats& now, const PackedBatch& batch) {
    rewards.clear();
    ExternalAnswer answer;
    answer.gradient.value = at::zeros_like(now.value);
    for (int64_t d = 0; d < batch.documents(); ++d) {
      const int64_t last = batch.bounds[static_cast<size_t>(d) + 1] - 1;
      rewards.push_back(now.value[last].item<double>());
      answer.loss += rewards.back();
      answer.gradient.value[last] = 1;
    }
    return answer;
  });
  engine->infer_batch(some(), &loss);
  const std::vector<double> want = rewards;
  auto scope = engine->train_mode();
  engine->forward_backward_batch(some(), &loss, false);
  ASSERT_EQ(rewards.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NE(rewards[i], 0);
    EXPECT_NEAR(rewards[i], want[i], 1e-6);
  }
  const Weight& bias = engine->session().store->weight("score.bias");
  EXPECT_EQ(bias.unit().grad_shard()[bias.offset()].item<float>(), 4);  // of each row its last token
}

TEST(ValueEngine, Trains) {
  TestEngine engine(engine_json("llama3"), "value_model");
  const ExternalLoss loss = towards_one();
  const double before = total(engine->infer_batch(some(), &loss));
  for (int step = 0; step < 20; ++step) engine->train_batch(some(), loss);
  EXPECT_LT(total(engine->infer_batch(some(), &loss)), before / 10);
  EXPECT_THROW(engine->train_batch(some(), SftLoss()), BadConfig);
  EngineBatch batch = some();
  batch.calculate_entropy = true;
  EXPECT_THROW(engine->infer_batch(batch), BadConfig);
}

TEST(Engine, ALossForTheOtherKindOfModelIsRefused) {
  EngineBatch batch = some();
  for (Sample& sample : batch.samples) {
    for (const char* name : {"values", "returns", "old_log_probs", "advantages"})
      sample.columns[name].assign(sample.ids.size(), 1.0);
  }
  TestEngine language(engine_json("llama3")), value(engine_json("llama3"), "value_model");
  const auto message = [&](TestEngine& engine, const Loss& loss) {
    return message_of<BadConfig>([&] { engine->train_batch(batch, loss); });
  };
  EXPECT_NE(message(language, ValueLoss()).find("needs the values"), std::string::npos);
  EXPECT_NE(message(value, PolicyLoss(PolicyLossConfig())).find("needs the log-probs"), std::string::npos);
  EXPECT_EQ(language->optimizer_step(), 0);
  EXPECT_GT(language->train_batch(batch, PolicyLoss(PolicyLossConfig())).metrics.at("grad_norm").value(), 0);
  EXPECT_GT(value->train_batch(batch, ValueLoss()).metrics.at("grad_norm").value(), 0);
}

TEST(ValueEngine, ReadsTheHeadsThatTransformersWritesAndAgreesWithIt) {
  const TestFolder folder;
  struct Variant {
    const char *weight, *bias;  // names in the file; null: there is none
    const char* architecture;
  };
  const std::vector<Variant> variants = {
      {"score.weight", "score.bias", "LlamaForTokenClassification"},
      {"score.weight", nullptr, "LlamaForSequenceClassification"},
      {"classifier.weight", "classifier.bias", "LlamaForTokenClassification"},
      {"v_head.summary.weight", "v_head.summary.bias", "LlamaForCausalLM"}};
  const HfTensors source(model_folder("llama3"));
  std::vector<float> score(64), bias = {0.25F};
  for (size_t i = 0; i < 64; ++i) score[i] = 0.01F * static_cast<float>(i);
  for (const Variant& variant : variants) {
    SCOPED_TRACE(variant.weight);
    std::vector<TensorView> tensors;
    for (const std::string& name : source.names())
      if (name != "lm_head.weight") tensors.push_back(source.at(name));
    const auto view = [&](const char* name, std::vector<int64_t> shape, std::vector<float>& values) {
      TensorView v;
      v.name = name;
      v.dtype = Dtype::F32;
      v.shape = std::move(shape);
      v.data = reinterpret_cast<const std::byte*>(values.data());
      v.nbytes = values.size() * sizeof(float);
      tensors.push_back(v);
    };
    view(variant.weight, {1, 64}, score);
    if (variant.bias) view(variant.bias, {1}, bias);
    const fs::path path = folder.path / fmt::format("{}", &variant - variants.data());
    fs::create_directories(path);
    write_safetensors(path / "model.safetensors", tensors, {});
    Json config = read_json(model_folder("llama3") + "/config.json");
    config["architectures"] = Json::array({variant.architecture});
    write_file(path / "config.json", config.dump());
    Json json = engine_json("llama3");
    json["model"]["path"] = path.string();
    TestEngine engine(json, "value_model");
    const ParamStore& store = *engine->session().store;
    const auto master = [&](const char* name) {
      const Weight& w = store.weight(name);
      return w.unit().shard().narrow(0, w.offset(), w.numel());
    };
    EXPECT_TRUE(master("score.weight").equal(at::tensor(score)));
    EXPECT_EQ(master("score.bias").item<float>(), variant.bias ? 0.25F : 0.0F);
    EXPECT_EQ(engine.logged("has no score.bias"), variant.bias == nullptr);
    EXPECT_FALSE(engine.logged("has no score.weight"));
    if (!variant.bias) continue;
    // transformers' own values (tests/data/engine/make_values.py).
    const Json reference = read_json(TITANIUM_SOURCE_DIR "/tests/data/engine/values.json");
    EngineBatch batch;
    for (const Json& ids : reference.at("ids")) {
      Sample sample;
      sample.ids = ids.get<std::vector<int32_t>>();
      sample.loss_mask.assign(sample.ids.size(), 1);
      batch.samples.push_back(std::move(sample));
    }
    const Jagged values = engine->infer_batch(batch).model_output.at("values");
    for (int64_t i = 0; i < values.rows(); ++i) {
      const auto want = reference.at("values")[static_cast<size_t>(i)].get<std::vector<double>>();
      for (size_t t = 0; t < want.size(); ++t)
        EXPECT_NEAR(values.row(i)[static_cast<int64_t>(t)].item<double>(), want[t], 2e-5);
    }
  }
}

// A loss of values on a language model, a loss of log-probs on a value model.
TEST(Engine, ALossOfTheOtherHeadIsRefused) {
  EngineBatch batch = some();
  for (Sample& sample : batch.samples) {
    for (const char* name : {"values", "returns", "old_log_probs", "advantages", "ref_log_prob"})
      sample.columns[name].assign(sample.ids.size(), 0.5);
  }
  for (size_t i = 0; i < 4; ++i) {
    batch.samples[i].group = static_cast<int64_t>(i / 2);
    batch.samples[i].seq_columns["chosen"] = static_cast<double>(i % 2);
  }
  const auto refused = [&](const TestEngine& engine, const Loss& loss, const std::string& statistic) {
    const std::string want = "the loss needs " + statistic + ", which this engine does not have";
    EXPECT_EQ(message_of<BadConfig>([&] { engine->infer_batch(batch, &loss); }), want);
    EXPECT_EQ(message_of<BadConfig>([&] { engine->train_batch(batch, loss); }), want);
    EXPECT_EQ(engine->optimizer_step(), 0);
  };
  TestEngine language(engine_json("llama3")), value(engine_json("llama3"), "value_model");
  refused(language, ValueLoss(), "the values");
  refused(language, RewardModelLoss(), "the values");
  refused(value, PolicyLoss(PolicyLossConfig()), "the log-probs");
  refused(value, DpoLoss(), "the log-probs");
  EXPECT_NO_THROW(language->train_batch(batch, DpoLoss()));
  EXPECT_NO_THROW(value->train_batch(batch, ValueLoss()));
  EXPECT_NO_THROW(value->train_batch(batch, RewardModelLoss()));
}

TEST(Engine, StreamsItsWeights) {
  Json json = engine_json("qwen3_tied", "bfloat16");
  json["engine"]["param_offload"] = true;
  TestEngine engine(json);
  SyncOptions options;
  options.dtype = std::nullopt;
  auto [stream, adapter] = engine->get_per_tensor_param(options);
  EXPECT_FALSE(adapter);
  size_t count = 0;
  while (const auto item = stream.next()) {
    const Weight& weight = engine->session().store->weight(item->name);
    const at::Tensor master =
        weight.unit().shard().narrow(0, weight.offset(), weight.numel()).view(weight.shape());
    EXPECT_TRUE(item->tensor.equal(master)) << item->name;
    ++count;
  }
  EXPECT_EQ(count, engine->session().store->table().weights().size());
  EXPECT_EQ(engine->disable_adapter(), nullptr);
}

TEST(Engine, NotesAndOverriddenKeysOfTheModelCount) {
  Json json = engine_json("llama3");
  json["engine"]["use_torch_compile"] = false;
  json["model"]["override_config"] = Json::parse(R"({"rms_norm_eps": 0.5, "attn_implementation": "eager"})");
  TestEngine engine(json), plain(engine_json("llama3"));
  EXPECT_TRUE(engine.logged("engine.use_torch_compile = false changes nothing"));
  EXPECT_EQ(engine->session().spec.config.rms_norm_eps, 0.5);
  EXPECT_FALSE(engine->infer_batch(some())
                   .model_output.at("log_probs")
                   .values.equal(plain->infer_batch(some()).model_output.at("log_probs").values));
}

TEST(Engine, RecomputeChangesNothing) {
  at::Tensor first;
  for (const char* mode : {"none", "selective", "full"}) {
    Json json = engine_json("llama3");
    json["engine"]["activation_checkpoint"] = mode;
    TestEngine engine(json);
    for (int step = 0; step < 2; ++step) engine->train_batch(some(), SftLoss());
    if (!first.defined()) first = all_masters(*engine).clone();
    EXPECT_TRUE(at::allclose(all_masters(*engine), first, 1e-5, 1e-5)) << mode;
  }
}

}  // namespace
}  // namespace titanium
