#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "titanium/base/error.h"
#include "titanium/engine/test_engine.h"
#include "titanium/formats/hf_tensors.h"
#include "titanium/weights/checkpoint.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

template <typename Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const BadCheckpoint& e) {
    return e.what();
  }
  return "no BadCheckpoint";
}

Json scheduled(const std::string& model = "llama3") {
  Json json = engine_json(model);
  json["optimizer"] = Json::parse(
      R"({"lr": 0.01, "lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "total_training_steps": 8})");
  return json;
}
EngineBatch batch_of(int step) {
  return test_batch(test_samples({6, 9, 4, 11}, static_cast<uint64_t>(step)));
}
void train(TestEngine& engine, int from, int to) {
  for (int step = from; step < to; ++step) {
    auto scope = engine->train_mode();
    engine->train_batch(batch_of(step), SftLoss());
    engine->lr_scheduler_step();
  }
}
Json contents(std::initializer_list<const char*> names) {
  Json list = Json::array();
  for (const char* name : names) list.push_back(name);
  return list;
}

TEST(EngineCheckpoint, AResumedRunIsBitwiseTheStraightOne) {
  const TestFolder folder;
  for (const char* model : {"llama3", "qwen3_tied"}) {
    const fs::path path = folder.path / model / "global_step_3";
    TestEngine straight(scheduled(model)), resumed(scheduled(model));
    train(straight, 0, 3);
    straight->param_groups()[0].weight_decay = 0.25;  // a caller's own
    straight->save_checkpoint(path, 3, 0);
    train(straight, 3, 7);
    train(resumed, 10, 11);  // away from the start
    resumed->load_checkpoint("");
    resumed->load_checkpoint(path);
    EXPECT_EQ(resumed->param_groups()[0].weight_decay, 0.25);
    train(resumed, 3, 7);
    EXPECT_TRUE(all_masters(*straight).equal(all_masters(*resumed))) << model;
    EXPECT_EQ(straight->param_groups(), resumed->param_groups());
  }
}

TEST(EngineCheckpoint, TheFolderHoldsWhatTheContentsSay) {
  const TestFolder folder;
  Json json = scheduled();
  TestEngine plain(json);
  plain->save_checkpoint(folder.path / "global_step_1", 1, 0);
  EXPECT_TRUE(fs::exists(folder.path / "global_step_1/step-1/COMPLETE"));
  EXPECT_TRUE(fs::exists(folder.path / "global_step_1/huggingface/config.json"));
  EXPECT_FALSE(fs::exists(folder.path / "global_step_1/huggingface/model.safetensors"));

  // Tokenizer and generation files come along.
  const fs::path tokenizer = folder.path / "tokenizer";
  fs::create_directories(tokenizer);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    std::ofstream(tokenizer / name) << "{}";
  json["model"]["tokenizer_path"] = tokenizer.string();
  json["checkpoint"]["save_contents"] = contents({"model", "optimizer", "extra", "hf_model"});
  TestEngine full(json);
  train(full, 0, 1);
  std::ofstream(folder.path / "global_step_1/data_0.pt") << "the trainer's own";
  full->save_checkpoint(folder.path / "global_step_1", 1, 0);  // again into the same folder
  EXPECT_TRUE(fs::exists(folder.path / "global_step_1/data_0.pt"));
  const fs::path hf = folder.path / "global_step_1/huggingface";
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"})
    EXPECT_TRUE(fs::exists(hf / name)) << name;

  // What it holds is a model that another engine starts from.
  Json other = scheduled();
  other["model"]["path"] = hf.string();
  TestEngine started(other);
  EXPECT_TRUE(all_masters(*started).equal(all_masters(*full)));

  // hf_model alone: no files of ours; and it can be loaded.
  json["checkpoint"]["save_contents"] = contents({"hf_model"});
  TestEngine export_only(json), reader(json);
  train(export_only, 0, 2);
  export_only->save_checkpoint(folder.path / "global_step_2", 2, 0);
  EXPECT_FALSE(fs::exists(folder.path / "global_step_2/step-2"));
  reader->load_checkpoint(folder.path / "global_step_2");
  EXPECT_TRUE(all_masters(*reader).equal(all_masters(*export_only)));

  // Saved without hf_model afterwards, no older weights stay behind.
  plain->save_checkpoint(folder.path / "global_step_2", 2, 0);
  EXPECT_FALSE(fs::exists(folder.path / "global_step_2/huggingface/model.safetensors"));
}

TEST(EngineCheckpoint, PartsCanBeLeftOut) {
  const TestFolder folder;
  TestEngine saver(scheduled());
  train(saver, 0, 3);
  saver->save_checkpoint(folder.path / "global_step_3", 3, 0);
  Json json = scheduled();
  json["checkpoint"]["load_contents"] = contents({"model"});
  TestEngine weights(json);
  weights->load_checkpoint(folder.path / "global_step_3");
  EXPECT_TRUE(all_masters(*weights).equal(all_masters(*saver)));
  EXPECT_EQ(weights->param_groups()[0].lr, 0);  // its schedule is at the start

  json["checkpoint"] = Json::object();
  json["checkpoint"]["save_contents"] = contents({"model"});
  TestEngine bare(json);
  bare->save_checkpoint(folder.path / "global_step_4", 4, 0);
  bare->load_checkpoint(folder.path / "global_step_4");
  EXPECT_NE(refusal([&] { saver->load_checkpoint(folder.path / "global_step_4"); }).find("extra"),
            std::string::npos);

  Json reference = engine_json("llama3");
  reference["engine"]["forward_only"] = true;
  TestEngine forward(reference);
  forward->load_checkpoint(folder.path / "global_step_3");
  EXPECT_TRUE(all_masters(*forward).equal(all_masters(*saver)));
}

TEST(EngineCheckpoint, NothingIsHalfLoaded) {
  const TestFolder folder;
  Json json = scheduled();
  json["checkpoint"]["save_contents"] = contents({"model", "extra", "hf_model"});
  json["checkpoint"]["load_contents"] = contents({"extra", "hf_model"});
  TestEngine saver(json), reader(json);
  train(saver, 0, 3);
  saver->save_checkpoint(folder.path / "global_step_3", 3, 0);
  const fs::path weights = folder.path / "global_step_3/huggingface/model.safetensors";
  fs::rename(weights, folder.path / "aside");
  const double rate = reader->param_groups()[0].lr;
  EXPECT_NE(refusal([&] { reader->load_checkpoint(folder.path / "global_step_3"); }), "no BadCheckpoint");
  EXPECT_EQ(reader->param_groups()[0].lr, rate);
  train(reader, 0, 1);
  EXPECT_EQ(reader->param_groups()[0].lr, 0.005);  // of the second step: the position is where it was
  fs::rename(folder.path / "aside", weights);
  reader->load_checkpoint(folder.path / "global_step_3");
  EXPECT_TRUE(all_masters(*reader).equal(all_masters(*saver)));
  EXPECT_EQ(reader->param_groups()[0].lr, saver->param_groups()[0].lr);
}

TEST(EngineCheckpoint, AValueModelComesBack) {
  const TestFolder folder;
  Json json = engine_json("llama3");
  json["checkpoint"]["save_contents"] = contents({"model", "optimizer", "extra", "hf_model"});
  TestEngine engine(json, "value_model");
  engine->save_checkpoint(folder.path / "global_step_1", 1, 0);
  const fs::path hf = folder.path / "global_step_1/huggingface";
  EXPECT_EQ(read_json(hf / "config.json").at("architectures"), Json::array({"LlamaForTokenClassification"}));
  EXPECT_TRUE(HfTensors(hf).find("score.weight"));
  EXPECT_FALSE(HfTensors(hf).find("lm_head.weight"));
  json["model"]["path"] = hf.string();
  json["engine"]["seed"] = 7;
  TestEngine again(json, "value_model");
  EXPECT_FALSE(again.logged("has no score.weight"));
  EXPECT_TRUE(all_masters(*again).equal(all_masters(*engine)));
}

TEST(EngineCheckpoint, TheNewestAreKeptOfThoseThisEngineSaved) {
  const TestFolder folder;
  const auto step = [&](int n) { return folder.path / fmt::format("global_step_{}", n); };
  TestEngine engine(scheduled());
  fs::create_directories(step(1));  // somebody else's
  for (int n = 2; n <= 5; ++n) {
    engine->save_checkpoint(step(n), n, 2);
    std::ofstream(step(n) / "data_0.pt") << "the trainer's";
    EXPECT_EQ(fs::exists(step(n - 2)), n < 4 && n - 2 == 1) << n;
  }
  EXPECT_TRUE(fs::exists(step(1)));
  EXPECT_TRUE(fs::exists(step(4)) && fs::exists(step(5)));
  engine->save_checkpoint(step(6), 6, 1);  // one is safe: the older goes when the newer is complete
  EXPECT_FALSE(fs::exists(step(4)) || fs::exists(step(5)));
  EXPECT_TRUE(fs::exists(step(6)));
  engine->save_checkpoint(step(7), 7, 0);
  EXPECT_TRUE(fs::exists(step(6)));
  EXPECT_THROW(engine->save_checkpoint(step(8), 8, -1), BadConfig);

  // An earlier run was killed while it removed the one of this name.
  const fs::path wreck = step(7).string() + ".removed";
  fs::create_directories(wreck / "huggingface");
  engine->save_checkpoint(step(8), 8, 1);
  EXPECT_TRUE(fs::exists(step(8)));
  EXPECT_FALSE(fs::exists(step(7)) || fs::exists(wreck));
}

TEST(EngineCheckpoint, ThatFolderOrAnError) {
  const TestFolder folder;
  TestEngine engine(scheduled());
  train(engine, 0, 1);
  engine->save_checkpoint(folder.path / "global_step_1", 1, 0);
  engine->save_checkpoint(folder.path / "global_step_2", 2, 0);
  const at::Tensor before = all_masters(*engine).clone();
  EXPECT_NE(refusal([&] { engine->load_checkpoint(folder.path / "global_step_3"); }).find("no such folder"),
            std::string::npos);
  EXPECT_NE(refusal([&] { engine->load_checkpoint(folder.path); }).find("holds no complete checkpoint"),
            std::string::npos);
  fs::remove(folder.path / "global_step_2/step-2/COMPLETE");
  EXPECT_NE(refusal([&] {
              engine->load_checkpoint(folder.path / "global_step_2");
            }).find("holds no complete checkpoint"),
            std::string::npos);
  {
    std::fstream file(folder.path / "global_step_1/step-1/master-00000.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-5, std::ios::end);
    file.put(1);
  }
  EXPECT_NE(refusal([&] { engine->load_checkpoint(folder.path / "global_step_1"); }).find("checksum"),
            std::string::npos);
  EXPECT_TRUE(all_masters(*engine).equal(before));
  Json sgd = scheduled();
  sgd["optimizer"]["optimizer"] = "SGD";
  TestEngine other(sgd);
  engine->save_checkpoint(folder.path / "global_step_4", 4, 0);
  EXPECT_NE(refusal([&] { other->load_checkpoint(folder.path / "global_step_4"); }).find("AdamW"),
            std::string::npos);
}

// Killed at any point, all but the newest folder are whole.
TEST(EngineCheckpoint, KilledHalfwayTheOlderOnesStay) {
  const TestFolder folder;
  TestEngine reader(engine_json("llama3"));
  int64_t kills_inside_a_save = 0;
  for (int round = 0; round < 6; ++round) {
    const fs::path run = folder.path / std::to_string(round);
    int out[2];
    ASSERT_EQ(pipe(out), 0);
    const pid_t child = fork();
    if (child == 0) {
      dup2(out[1], 1);
      execl(TITANIUM_BINARY_DIR "/engine_checkpoint_child", "child", run.c_str(),
            model_folder("llama3").c_str(), nullptr);
      _exit(127);
    }
    close(out[1]);
    FILE* lines = fdopen(out[0], "r");
    long saved = 0;
    for (int i = 0; i < 3; ++i) ASSERT_EQ(fscanf(lines, "%ld", &saved), 1);
    // The fourth save begins; a moment later it is somewhere between its first file and its end.
    const fs::path begun = round % 2 == 0 ? run / "global_step_4" : run / "global_step_4/step-4.partial";
    for (int i = 0; i < 100000 && !fs::exists(begun) && !fs::exists(run / "global_step_5"); ++i) usleep(100);
    usleep(static_cast<useconds_t>(500 * (round / 2)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    while (fscanf(lines, "%ld", &saved) == 1) continue;
    fclose(lines);
    // What was reported is there, and so is the one before it.
    for (long step = saved - 1; step <= saved; ++step) {
      const fs::path path = run / fmt::format("global_step_{}", step);
      if (step == saved - 1 &&
          fs::exists(run / fmt::format("global_step_{}/step-{}/COMPLETE", saved + 1, saved + 1)))
        continue;  // the next one was complete, and this one may be gone
      EXPECT_NO_THROW(reader->load_checkpoint(path)) << path;
    }
    kills_inside_a_save += fs::exists(run / fmt::format("global_step_{}", saved + 1));
    for (const auto& entry : fs::directory_iterator(run)) {
      const std::string name = entry.path().filename().string();
      if (name.ends_with(".removed") || name == fmt::format("global_step_{}", saved + 1)) continue;
      EXPECT_NO_THROW(reader->load_checkpoint(entry.path())) << name;
    }
  }
  EXPECT_GT(kills_inside_a_save, 0);
}

}  // namespace
}  // namespace titanium
