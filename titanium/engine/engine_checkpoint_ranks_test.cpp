// Saved on one layout, loaded on another.
#include <atomic>
#include <fstream>

#include "titanium/base/error.h"
#include "titanium/engine/test_ranks.h"
#include "titanium/formats/hf_tensors.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;

const Layout kSaver{.name = "fsdp2_tp2", .shard = 2, .tp = 2};
const Layout kPipeline{.name = "fsdp2_pp2", .shard = 2, .pp = 2};
const Layout kReaders[] = {
    {.name = "one"},
    {.name = "fsdp3", .shard = 3},
    {.name = "tp2", .tp = 2},
    {.name = "hsdp2x2", .replicate = 2, .shard = 2},
    {.name = "pp2_v", .pp = 2, .schedule = "ZBVZeroBubble"},
    kPipeline,
    kSaver,
};

Json config(std::initializer_list<const char*> contents = {"model", "optimizer", "extra"}) {
  Json json = engine_json("qwen3_tied", "float64");
  json["optimizer"] = Json::parse(
      R"({"lr": 0.01, "lr_scheduler_type": "cosine", "lr_warmup_steps": 2, "total_training_steps": 8})");
  json["checkpoint"]["save_contents"] = json["checkpoint"]["load_contents"] = Json(contents);
  return json;
}

// Twelve samples, which 1 to 4 data ranks divide.
std::vector<Sample> samples_of(int step) {
  return test_samples({6, 9, 4, 11, 7, 3, 12, 5, 8, 10, 6, 4}, static_cast<uint64_t>(step));
}

struct Steps {
  std::vector<double> losses, norms;
  Whole masters;
};

void train(RankEngine& engine, int from, int to, Steps* steps) {
  for (int step = from; step < to; ++step) {
    auto scope = engine->train_mode();
    const EngineOutput out = engine->train_batch(test_batch(engine.share(samples_of(step))), SftLoss());
    engine->lr_scheduler_step();
    if (!steps) continue;
    const double loss = engine->get_data_parallel_group().sum(total(out));
    if (engine.rank != 0) continue;
    steps->losses.push_back(loss);
    steps->norms.push_back(out.metrics.at("grad_norm").value());
  }
  if (steps) steps->masters.add_masters(*engine);
}

void expect_others_go_on_from(const Layout& saver) {
  const TestFolder folder;
  const fs::path path = folder.path / "global_step_3";
  Steps straight;
  on_ranks(config(), saver, [&](RankEngine& engine) {
    train(engine, 0, 3, nullptr);
    engine->param_groups()[0].weight_decay = 0.25;  // a caller's own
    engine->save_checkpoint(path, 3, 0);
    train(engine, 3, 5, &straight);
  });
  EXPECT_TRUE(fs::exists(path / "huggingface/config.json"));
  for (const Layout& layout : kReaders) {
    SCOPED_TRACE(layout.name);
    Steps resumed;
    on_ranks(config(), layout, [&](RankEngine& engine) {
      train(engine, 10, 11, nullptr);  // away from the start
      engine->load_checkpoint(path);
      EXPECT_EQ(engine->param_groups()[0].weight_decay, 0.25);
      train(engine, 3, 5, &resumed);
    });
    const bool same = layout.name == saver.name;
    ASSERT_EQ(resumed.losses.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_NEAR(resumed.losses[i], straight.losses[i], same ? 0 : 1e-9);
      EXPECT_NEAR(resumed.norms[i], straight.norms[i], same ? 0 : 1e-9);
    }
    EXPECT_LE(resumed.masters.difference(straight.masters), same ? 0 : 1e-9);
  }
}

TEST(EngineCheckpointRanks, AnyLayoutGoesOnFromAnyOther) {
  for (const Layout& saver : {kSaver, kPipeline}) {
    SCOPED_TRACE("saved on " + saver.name);
    expect_others_go_on_from(saver);
  }
}

TEST(EngineCheckpointRanks, ContentsAreSavedAndLoadedOnRanks) {
  const TestFolder folder;
  Whole want;  // of the first layout, one rank
  for (const Layout& layout : kReaders) {
    SCOPED_TRACE(layout.name);
    const fs::path run = folder.path / layout.name;
    const auto step = [&](int n) { return run / fmt::format("global_step_{}", n); };
    Whole saved;
    on_ranks(config({"model", "optimizer", "extra", "hf_model"}), layout, [&](RankEngine& engine) {
      train(engine, 0, 1, nullptr);
      for (int n = 1; n <= 4; ++n) engine->save_checkpoint(step(n), n, 2);
      saved.add_masters(*engine);
      if (layout.name == "one") want.add_masters(*engine);
    });
    EXPECT_FALSE(fs::exists(step(1)) || fs::exists(step(2)));
    EXPECT_TRUE(fs::exists(step(3)) && fs::exists(step(4)));
    EXPECT_LT(saved.difference(want), 1e-9);

    // The masters are in fp64, so the export is what was trained; it is read by contents and by path.
    Whole from_hf, from_path;
    on_ranks(config({"hf_model"}), layout, [&](RankEngine& engine) {
      engine->load_checkpoint(step(4));
      from_hf.add_masters(*engine);
    });
    Json other = config();
    other["model"]["path"] = (step(3) / "huggingface").string();
    on_ranks(other, {.name = "one"}, [&](RankEngine& engine) { from_path.add_masters(*engine); });
    EXPECT_EQ(from_hf.difference(saved), 0);
    EXPECT_EQ(from_path.difference(saved), 0);
  }
}

TEST(EngineCheckpointRanks, WhatFailsOnOneRankFailsOnAll) {
  const TestFolder folder;
  const fs::path path = folder.path / "global_step_1", file = folder.path / "file";
  std::ofstream(file) << "not a folder";
  std::atomic<int> save = 0, load = 0, missing = 0, different = 0, damaged = 0;
  on_ranks(config(), kSaver, [&](RankEngine& engine) {
    save += message_of<BadCheckpoint>([&] {
              engine->save_checkpoint(file / "global_step_1", 1, 0);
            }).find("rank 0: " + file.string()) == 0;
    missing += message_of<BadCheckpoint>([&] {
                 engine->load_checkpoint(folder.path / "none");
               }).find("there is no such folder") != std::string::npos;
    load += message_of<BadCheckpoint>([&] {
              engine->load_checkpoint(folder.path);
            }).find("holds no complete checkpoint") != std::string::npos;
    different += message_of<BadConfig>([&] {
                   engine->save_checkpoint(path, engine.rank == 3 ? 2 : 1, 0);
                 }).find("of rank 3 is not that of rank 0") != std::string::npos;
    EXPECT_FALSE(fs::exists(path));
    engine->save_checkpoint(path, 1, 0);
    if (engine.rank == 0) {
      for (const auto& entry : fs::directory_iterator(path / "step-1")) {
        if (entry.path().extension() != ".safetensors") continue;
        std::fstream bytes(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
        bytes.seekp(-5, std::ios::end);
        bytes.put(1);
        break;
      }
    }
    train(engine, 0, 1, nullptr);  // everyone waits for the damage
    const at::Tensor masters = all_masters(*engine).clone();
    damaged += message_of<BadCheckpoint>([&] { engine->load_checkpoint(path); }).find("checksum") !=
               std::string::npos;
    EXPECT_TRUE(all_masters(*engine).equal(masters));
    train(engine, 1, 2, nullptr);
  });
  for (const auto* count : {&save, &load, &missing, &different, &damaged}) EXPECT_EQ(*count, 4);
}

}  // namespace
}  // namespace titanium
