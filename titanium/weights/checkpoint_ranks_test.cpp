// Checkpoints of many ranks, as threads.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <future>
#include <mutex>
#include <thread>

#include "titanium/formats/safetensors.h"
#include "titanium/formats/test_util.h"
#include "titanium/weights/checkpoint.h"
#include "titanium/weights/hash.h"
#include "titanium/weights/toy_ranks.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::kLayouts;
using testing::Layout;
using testing::on_ranks;
using testing::TempFolder;
using testing::ToyRank;

void save(ToyRank& rank, const CheckpointOptions& options, int64_t step) {
  Checkpointer checkpointer(*rank.store, rank.optimizer.get(), options);
  checkpointer.save(step, {{"position", 17}});
  checkpointer.wait();
}

LoadedCheckpoint load(ToyRank& rank, const fs::path& path) {
  return Checkpointer(*rank.store, rank.optimizer.get(), {.folder = path.parent_path()}).load(path);
}

void save_on(const Layout& layout, const fs::path& folder, int64_t step) {
  on_ranks(layout, [&](ToyRank& rank) {
    rank.fill();
    save(rank, {.folder = folder}, step);
  });
}

void expect_loads_on(const Layout& layout, const fs::path& path) {
  SCOPED_TRACE(::testing::PrintToString(layout));
  on_ranks(layout, [&](ToyRank& rank) {
    rank.spoil();
    const LoadedCheckpoint loaded = load(rank, path);
    EXPECT_EQ(rank.wrong(), "") << "rank " << rank.mesh.rank();
    EXPECT_EQ(loaded.train, (Json{{"position", 17}}));
    EXPECT_EQ(path.filename(), checkpoint_name(loaded.step));
  });
}

class SavedOn : public ::testing::TestWithParam<Layout> {};

// E07 for weights and state.
TEST_P(SavedOn, LoadsOnEveryOtherLayoutBitwise) {
  const TempFolder folder;
  save_on(GetParam(), folder.path(), 3);
  EXPECT_EQ(folder.files(), 1u);
  for (const Layout& layout : kLayouts) expect_loads_on(layout, folder / "step-3");
  // Every element is in the files once.
  std::map<std::string, int64_t> elements;
  for (const SavedSlice& slice : read_manifest(folder / "step-3").slices)
    elements[slice.weight + " " + slice.state] += slice.piece.count();
  EXPECT_EQ(elements.at("down.weight exp_avg"), 1200);
  EXPECT_EQ(elements.at("k.weight master"), 96);
  EXPECT_EQ(elements.at("norm.weight master"), 24);
  EXPECT_EQ(elements.count("fixed exp_avg"), 0u);
}

INSTANTIATE_TEST_SUITE_P(Layouts, SavedOn, ::testing::ValuesIn(kLayouts));

TEST(CheckpointRanks, ARankReadsWhatItOwns) {
  constexpr int64_t kRows = 2000;  // 8 MB a matrix
  const TempFolder folder;
  const auto save_large = [&](const Layout& layout, int64_t step) {
    on_ranks(
        layout,
        [&](ToyRank& rank) {
          rank.fill();
          save(rank, {.folder = folder.path()}, step);
        },
        {}, kRows);
  };
  const auto load_large = [&](const Layout& layout, int64_t step, double most) {
    on_ranks(
        layout,
        [&](ToyRank& rank) {
          const LoadedCheckpoint loaded = load(rank, folder / checkpoint_name(step));
          EXPECT_EQ(rank.wrong(), "");
          const auto share = static_cast<double>(rank.owned() * 4 * 3);
          EXPECT_LE(static_cast<double>(loaded.bytes), most * share) << "rank " << rank.mesh.rank();
        },
        {}, kRows);
  };
  save_large({1, 1, 1}, 1);
  load_large({1, 1, 1}, 1, 1.0);
  load_large({1, 4, 1}, 1, 1.6);  // the megabytes at both ends
  save_large({1, 2, 2}, 2);
  load_large({1, 2, 2}, 2, 1.0);
  load_large({1, 3, 1}, 2, 2.2);  // whole rows out of columns

  // The same as version 1 had it.
  Manifest manifest = read_manifest(folder / "step-1");
  Json json = read_json(folder / "step-1/manifest.json");
  json["version"] = 1;
  for (size_t i = 0; i < manifest.slices.size(); ++i) {
    const SavedSlice& slice = manifest.slices[i];
    const SafetensorsFile file(folder / "step-1" / manifest.files[slice.file].name);
    const TensorView& view = file.at(slice.weight);
    json["slices"][i]["xxh64"] = to_hex(Hash64::of({view.data, view.nbytes}));
  }
  write_file(folder / "step-1/manifest.json", json.dump());
  mark_complete(folder / "step-1");
  load_large({1, 2, 2}, 1, 100);
}

TEST(CheckpointRanks, AnAsyncSaveHoldsTheValuesAtTheCall) {
  for (const uint64_t snapshot_bytes : {uint64_t{0}, uint64_t{3000}, UINT64_MAX}) {
    const TempFolder folder;
    on_ranks({2, 2, 2}, [&](ToyRank& rank) {
      rank.fill();
      Checkpointer checkpointer(*rank.store, rank.optimizer.get(),
                                {.folder = folder.path(), .snapshot_bytes = snapshot_bytes});
      checkpointer.save(1, {{"position", 17}});
      rank.spoil();
      rank.mesh.all().barrier();  // training's own collectives go on
      checkpointer.save(2, {{"position", 18}});
      rank.fill();
      checkpointer.wait();
    });
    expect_loads_on({1, 3, 1}, folder / "step-1");
    on_ranks({1, 2, 1}, [&](ToyRank& rank) {
      rank.fill();
      load(rank, folder / "step-2");
      EXPECT_NE(rank.wrong(), "");
    });
  }
}

// The stage of one rank fails; every rank gets that error, and the older checkpoint stays.
TEST(CheckpointRanks, WhatFailsOnOneRankFailsOnAll) {
  const Layout layout{1, 2, 2};
  const TempFolder folder;
  save_on(layout, folder.path(), 1);
  std::array<std::vector<std::string>, 4> stages;
  on_ranks(layout, [&](ToyRank& rank) {
    rank.fill();
    CheckpointOptions options{.folder = folder.path(), .keep_latest_k = 1};
    options.on_stage = [&](std::string_view stage) { stages[rank.mesh.rank()].emplace_back(stage); };
    save(rank, options, 1);
  });
  EXPECT_EQ(stages[0].back(), "prune");
  EXPECT_EQ(stages[3].back(), "close exp_avg_sq-00003.safetensors");
  for (int culprit : {0, 1, 3}) {
    for (const std::string& at : stages[culprit]) {
      std::vector<std::string> errors(4);
      on_ranks(layout, [&](ToyRank& rank) {
        rank.fill();
        CheckpointOptions options{.folder = folder.path(), .keep_latest_k = 1};
        options.on_stage = [&](std::string_view stage) {
          if (rank.mesh.rank() != culprit || stage != at) return;
          if (culprit == 3) throw std::runtime_error("of another kind");
          throw BadCheckpoint("disk of rank {}", culprit);
        };
        Checkpointer checkpointer(*rank.store, rank.optimizer.get(), options);
        checkpointer.save(2, {{"position", 17}});
        rank.spoil();
        errors[rank.mesh.rank()] = error_of([&] { checkpointer.wait(); });
        checkpointer.wait();
      });
      for (const std::string& error : errors) {
        EXPECT_EQ(error, culprit == 3
                             ? "BadCheckpoint: rank 3: the checkpoint could not be saved: of another kind"
                             : fmt::format("BadCheckpoint: rank {0}: disk of rank {0}", culprit))
            << at;
      }
      EXPECT_EQ(find_latest(folder.path()).found->step, at == "prune" ? 2 : 1);
      EXPECT_TRUE(find_latest(folder.path()).warnings.empty());
      fs::remove_all(folder / "step-2");
    }
  }
  expect_loads_on({1, 1, 3}, folder / "step-1");
}

TEST(CheckpointRanks, ASystemErrorOfOneRankIsSaidOnAll) {
  const TempFolder folder;
  save_on({1, 3, 1}, folder.path(), 1);
  std::vector<std::string> errors(3);
  on_ranks({1, 3, 1}, [&](ToyRank& rank) {
    CheckpointOptions options{.folder = folder.path(), .async = false};
    options.on_stage = [&](std::string_view stage) {
      if (stage == "close master-00002.safetensors" && fs::exists(folder / "step-2.partial"))
        fs::create_directories(folder / "step-2.partial/master-00002.safetensors/in the way");
    };
    Checkpointer checkpointer(*rank.store, rank.optimizer.get(), options);
    errors[rank.mesh.rank()] = error_of([&] { checkpointer.save(2, {}); });
    checkpointer.save(3, {{"position", 17}});
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error, errors[0]);
    EXPECT_SAYS(error, "BadCheckpoint: rank 2: ");
    EXPECT_SAYS(error, "step-2.partial/master-00002.safetensors: cannot be put in place: ");
  }
  EXPECT_EQ(list_checkpoints(folder.path()).size(), 2u);
  EXPECT_EQ(folder.files(), 2u);
}

// One rank's disk takes longer than a collective may.
TEST(CheckpointRanks, OthersWaitForASlowDisk) {
  const TempFolder folder;
  run_ranks(
      2,
      [&](std::shared_ptr<World> world) {
        ToyRank rank({1, 2, 1}, std::move(world));
        rank.fill();
        CheckpointOptions options{.folder = folder.path()};
        options.on_stage = [&](std::string_view stage) {
          if (rank.mesh.rank() == 1 && stage == "close exp_avg-00001.safetensors")
            std::this_thread::sleep_for(std::chrono::milliseconds(4500));
        };
        save(rank, options, 1);
      },
      std::chrono::seconds(3));
  expect_loads_on({1, 3, 1}, folder / "step-1");
}

TEST(CheckpointRanks, ARankThatIsLostMeanwhileLeavesAWreckThatResumePassesOver) {
  const Layout layout{1, 2, 2};
  const TempFolder folder;
  save_on(layout, folder.path(), 1);
  std::mutex mutex;
  int lost = 0;
  const std::string error = error_of([&] {
    on_ranks(layout, [&](ToyRank& rank) {
      rank.fill();
      CheckpointOptions options{.folder = folder.path()};
      options.on_stage = [&](std::string_view stage) {
        if (rank.mesh.rank() != 2 || !stage.starts_with("close")) return;
        rank.mesh.world().fail("it was killed");
        throw RankLost("this one");
      };
      Checkpointer checkpointer(*rank.store, rank.optimizer.get(), options);
      checkpointer.save(2, {});
      try {
        checkpointer.wait();
      } catch (const RankLost&) {
        const std::lock_guard lock(mutex);
        ++lost;
      }
    });
  });
  EXPECT_EQ(lost, 4) << error;
  const LatestCheckpoint latest = find_latest(folder.path());
  EXPECT_EQ(latest.found->step, 1);
  ASSERT_EQ(latest.warnings.size(), 1u);
  EXPECT_SAYS(latest.warnings[0], "step-2.partial: passed over: a save that was interrupted");
  on_ranks({1, 3, 1}, [&](ToyRank& rank) {
    const LatestCheckpoint agreed = find_latest(folder.path(), rank.mesh.all());
    EXPECT_EQ(agreed.warnings, latest.warnings);
    EXPECT_EQ(agreed.found->path, latest.found->path);
    EXPECT_EQ(agreed.found->step, 1);
    EXPECT_FALSE(find_latest(folder / "absent", rank.mesh.all()).found);
    load(rank, agreed.found->path);
    EXPECT_EQ(rank.wrong(), "");
    save(rank, {.folder = folder.path()}, 2);
  });
  EXPECT_EQ(folder.files(), 2u);
  expect_loads_on({1, 2, 2}, folder / "step-2");
}

// One rank alone reads what is damaged; all refuse, and nothing has changed.
TEST(CheckpointRanks, DamageThatOneRankSeesIsRefusedByAll) {
  const TempFolder folder;
  save_on({1, 1, 3}, folder.path(), 1);
  const fs::path file = folder / "step-1/exp_avg-00002.safetensors";
  std::string bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  testing::put(file, bytes);
  std::vector<std::string> errors(3);
  on_ranks({1, 1, 3}, [&](ToyRank& rank) {
    rank.fill();
    errors[rank.mesh.rank()] = error_of([&] { load(rank, folder / "step-1"); });
    EXPECT_EQ(rank.wrong(), "");
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error, errors[0]);
    EXPECT_SAYS(error, "BadCheckpoint: rank 2: ");
    EXPECT_SAYS(error, "exp_avg-00002.safetensors: 'exp_avg' of the weight");
  }
}

TEST(CheckpointRanks, ColumnsThatAreMissingOrSavedTwiceAreNamed) {
  const TempFolder folder;
  save_on({1, 1, 2}, folder.path(), 1);
  const Json good = read_json(folder / "step-1/manifest.json");
  const auto lie = [&](const std::function<void(Json&)>& change) {
    Json bad = good;
    change(bad);
    write_file(folder / "step-1/manifest.json", bad.dump());
    mark_complete(folder / "step-1");
    std::string error;
    on_ranks({1, 1, 1}, [&](ToyRank& rank) { error = error_of([&] { load(rank, folder / "step-1"); }); });
    return error;
  };
  const auto find = [](Json& json, const Json& columns) -> size_t {
    for (size_t i = 0; i < json["slices"].size(); ++i) {
      const Json& slice = json["slices"][i];
      if (slice["weight"] == "down.weight" && slice["state"] == "master" && slice["columns"] == columns)
        return i;
    }
    throw std::runtime_error("no such slice");
  };
  EXPECT_SAYS(lie([&](Json& json) {
                json["slices"].erase(find(json, {29, 50}));
              }),
              "'master' of the weight 'down.weight' is not whole: elements from 29 on are missing");
  EXPECT_SAYS(lie([&](Json& json) {
                const size_t i = find(json, {29, 50});
                json["slices"][i]["columns"] = {28, 49};
              }),
              "'master' of 'down.weight' is saved twice from element 28 on");
}

}  // namespace
}  // namespace titanium
