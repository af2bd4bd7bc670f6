#include "titanium/weights/checkpoint.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <future>
#include <thread>

#include "titanium/formats/safetensors.h"
#include "titanium/formats/test_util.h"
#include "titanium/weights/manifest.h"
#include "titanium/weights/toy_run.h"

namespace titanium {
namespace {

namespace fs = std::filesystem;
using testing::error_of;
using testing::put;
using testing::TempFolder;
using testing::ToyOptions;
using testing::ToyRun;

void save(ToyRun& run, const CheckpointOptions& options, int64_t step, Json train = {}) {
  Checkpointer checkpointer(*run.store, run.optimizer.get(), options);
  checkpointer.save(step, std::move(train));
  checkpointer.wait();
}

LoadedCheckpoint load(ToyRun& run, const fs::path& path) {
  return Checkpointer(*run.store, run.optimizer.get(), {.folder = path.parent_path()}).load(path);
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

// E01, E03.
TEST(Checkpoint, AResumedRunIsBitwiseTheStraightRun) {
  using at::kBFloat16, at::kDouble, at::kFloat;
  const OptimizerOptions sgd = {.name = "SGD", .momentum = 0.9}, bf16 = {.state_dtype = kBFloat16};
  for (const ToyOptions& options :
       {ToyOptions{}, ToyOptions{.dtypes = {kFloat, kBFloat16, kFloat}, .optimizer = bf16},
        ToyOptions{.dtypes = {kBFloat16, kBFloat16, kFloat}, .optimizer = bf16},
        ToyOptions{.dtypes = {kDouble, kDouble, kDouble}}, ToyOptions{.optimizer = sgd}}) {
    for (bool async : {false, true}) {
      ToyRun straight(options);
      for (int step = 0; step < 4; ++step) straight.step(step);

      const TempFolder folder;
      std::string saved;
      {
        ToyRun first(options);
        for (int step = 0; step < 2; ++step) first.step(step);
        save(first, {.folder = folder.path(), .async = async}, 2, {{"position", 17}, {"seed", 5}});
        saved = first.fingerprint();
      }
      ToyOptions other = options;
      other.seed = 99;
      ToyRun second(other);
      second.step(7);  // state that must go
      const LoadedCheckpoint loaded = load(second, folder / "step-2");
      EXPECT_EQ(loaded.step, 2);
      EXPECT_EQ(loaded.train, (Json{{"position", 17}, {"seed", 5}}));
      EXPECT_EQ(second.fingerprint(), saved);
      for (int step = 2; step < 4; ++step) second.step(step);
      EXPECT_EQ(second.fingerprint(), straight.fingerprint());
    }
  }
}

// E09: the values at the call, whatever is written meanwhile and however little may be copied.
TEST(Checkpoint, AnAsyncSaveHoldsTheValuesAtTheCall) {
  for (const uint64_t snapshot_bytes : {uint64_t{0}, uint64_t{30000}, UINT64_MAX}) {
    const TempFolder folder;
    ToyRun run;
    run.step(0);
    const std::string at_call = run.fingerprint();
    std::promise<void> filled;
    CheckpointOptions options{.folder = folder.path(), .snapshot_bytes = snapshot_bytes};
    if (snapshot_bytes == UINT64_MAX) {  // everything is overwritten before the writer starts
      options.on_stage = [&](std::string_view stage) {
        if (stage == "files") filled.get_future().wait();
      };
    }
    Checkpointer checkpointer(*run.store, run.optimizer.get(), options);
    checkpointer.save(1, {});
    for (const auto& unit : run.store->units()) {
      run.store->before_write(*unit);
      unit->shard().fill_(7);
      for (const char* state : {"exp_avg", "exp_avg_sq"}) run.optimizer->state(*unit, state).fill_(7);
      unit->written();
    }
    filled.set_value();
    run.step(1);
    run.step(2);
    checkpointer.wait();
    ToyRun loaded({.seed = 3});
    load(loaded, folder / "step-1");
    EXPECT_EQ(loaded.fingerprint(), at_call) << snapshot_bytes;
  }
}

TEST(Checkpoint, AnUpdateWaitsForTheDiskWhereNothingMayBeCopied) {
  const TempFolder folder;
  ToyRun run;
  CheckpointOptions options{.folder = folder.path(), .snapshot_bytes = 0};
  std::promise<void> go;
  options.on_stage = [&](std::string_view stage) {
    if (stage == "files") go.get_future().wait();
  };
  Checkpointer checkpointer(*run.store, run.optimizer.get(), options);
  checkpointer.save(0, {});
  auto update = std::async(std::launch::async, [&] { run.store->before_write(run.store->unit(0)); });
  EXPECT_EQ(update.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  EXPECT_TRUE(checkpointer.pending());
  go.set_value();
  update.get();
  checkpointer.wait();
  EXPECT_FALSE(checkpointer.pending());
}

TEST(Checkpoint, TrainingGoesOnDuringManySaves) {
  const TempFolder folder;
  ToyRun run({.width = 160});
  Checkpointer checkpointer(*run.store, run.optimizer.get(), {.folder = folder.path(), .keep_latest_k = 0});
  std::vector<std::string> straight;
  for (int step = 1; step <= 12; ++step) {
    run.step(step);
    straight.push_back(run.fingerprint());
    checkpointer.save(step, {});  // waits for the one before
  }
  checkpointer.wait();
  for (int step = 1; step <= 12; ++step) {
    ToyRun loaded({.width = 160});
    load(loaded, folder / checkpoint_name(step));
    EXPECT_EQ(loaded.fingerprint(), straight[step - 1]) << step;
  }
}

TEST(Checkpoint, ALoadWaitsForAPendingSave) {
  const TempFolder folder;
  ToyRun run;
  Checkpointer checkpointer(*run.store, run.optimizer.get(), {.folder = folder.path()});
  const std::string before = run.fingerprint();
  checkpointer.save(1, {});
  run.step(0);
  EXPECT_EQ(checkpointer.load(folder / "step-1").step, 1);
  EXPECT_EQ(run.fingerprint(), before);
}

// A disk that was full for a moment costs the save that met it, and no later one.
TEST(Checkpoint, AFailedSaveIsSaidOnceAndTheNextIsMade) {
  const TempFolder folder;
  put(folder / "file", "not a folder");
  ToyRun run;
  Checkpointer checkpointer(*run.store, run.optimizer.get(), {.folder = folder / "file"});
  EXPECT_FALSE(checkpointer.take_error());
  checkpointer.save(1, {});
  std::exception_ptr error;
  while (!error) error = checkpointer.take_error();  // without waiting for anything
  const std::string said = error_of([&] { std::rethrow_exception(error); });
  EXPECT_SAYS(said, "BadCheckpoint: ");
  EXPECT_SAYS(said, (folder / "file").string());
  EXPECT_SAYS(said, "Not a directory");
  EXPECT_FALSE(checkpointer.take_error());
  checkpointer.wait();

  checkpointer.save(2, {});
  while (checkpointer.pending()) std::this_thread::yield();
  fs::remove(folder / "file");
  run.step(0);
  checkpointer.save(3, {});  // nobody has asked for the error of step 2
  EXPECT_SAYS(error_of([&] { checkpointer.wait(); }), "Not a directory");
  EXPECT_EQ(error_of([&] { checkpointer.wait(); }), "nothing");
  EXPECT_EQ(find_latest(folder / "file").found->step, 3);
  ToyRun loaded({.seed = 3});
  load(loaded, folder / "file/step-3");
  EXPECT_EQ(loaded.fingerprint(), run.fingerprint());
}

TEST(Checkpoint, ASaveThatIsNotAsyncThrowsItsOwnError) {
  const TempFolder folder;
  put(folder / "file", "not a folder");
  ToyRun run;
  Checkpointer checkpointer(*run.store, run.optimizer.get(), {.folder = folder / "file", .async = false});
  EXPECT_SAYS(error_of([&] { checkpointer.save(1, {}); }), "Not a directory");
  EXPECT_EQ(error_of([&] { checkpointer.wait(); }), "nothing");
  fs::remove(folder / "file");
  checkpointer.save(2, {});
  EXPECT_EQ(find_latest(folder / "file").found->step, 2);
}

// E10.
TEST(KeepLatest, KnowsCheckpointsOfEarlierProcessesAndLeavesForeignFolders) {
  const TempFolder folder;
  for (const char* name : {"step-7-mine", "step-007", "notes", "step-x", "step-8"})
    fs::create_directory(folder / name);
  put(folder / "step-6", "a file");
  ToyRun run;
  {
    Checkpointer checkpointer(*run.store, run.optimizer.get(), {.folder = folder.path(), .keep_latest_k = 2});
    checkpointer.save(5, {});
    checkpointer.save(9, {});
    checkpointer.save(10, {});
  }
  fs::create_directory(folder / "step-11.partial");
  put(folder / "step-11.partial/COMPLETE", "");
  EXPECT_FALSE(find_latest(folder.path()).warnings.empty());
  save(run, {.folder = folder.path(), .keep_latest_k = 2}, 11);
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"notes", "step-007", "step-10", "step-11",
                                                               "step-6", "step-7-mine", "step-8", "step-x"}));
  const std::vector<CheckpointInfo> all = list_checkpoints(folder.path());
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].step, 10);
}

TEST(KeepLatest, NeverRemovesTheNewOneEvenAtALowerStep) {
  const TempFolder folder;
  ToyRun run;
  save(run, {.folder = folder.path(), .keep_latest_k = 1}, 10);
  save(run, {.folder = folder.path(), .keep_latest_k = 1}, 6);  // a run that went back to step 5
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"step-6"}));
}

TEST(KeepLatest, AFailureAtAnyStageKeepsTheOnlyGoodOne) {
  const TempFolder folder;
  ToyRun run;
  run.step(0);
  std::vector<std::string> stages;
  CheckpointOptions record{.folder = folder.path(), .keep_latest_k = 1};
  record.on_stage = [&](std::string_view stage) { stages.emplace_back(stage); };
  save(run, record, 0);
  EXPECT_EQ(stages.size(), 11u);
  for (int again = 0; again < 2; ++again) {  // a new step; then one that replaces a step of the same number
    for (size_t i = 0; i < stages.size(); ++i) {
      const int64_t good = find_latest(folder.path()).found->step, next = good + (again ? 0 : 1);
      const std::string before = run.fingerprint();
      run.step(1);
      CheckpointOptions options{.folder = folder.path(), .keep_latest_k = 1};
      options.on_stage = [&](std::string_view stage) {
        if (stage == stages[i]) throw BadCheckpoint("made to fail");
      };
      EXPECT_EQ(error_of([&] { save(run, options, next); }), "BadCheckpoint: made to fail");
      const LatestCheckpoint latest = find_latest(folder.path());
      ASSERT_TRUE(latest.found) << stages[i];
      EXPECT_EQ(latest.found->step, stages[i] == "prune" ? next : good);
      ToyRun loaded({.seed = 4});
      load(loaded, latest.found->path);
      EXPECT_EQ(loaded.fingerprint(), stages[i] == "prune" ? run.fingerprint() : before) << stages[i];
      save(run, {.folder = folder.path(), .keep_latest_k = 1}, next);
      EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{checkpoint_name(next)}));
    }
  }
}

TEST(KeepLatest, ACheckpointThatWasBeingReplacedCountsUntilTheNewOneIsThere) {
  const TempFolder folder;
  ToyRun run;
  save(run, {.folder = folder.path()}, 3);
  fs::rename(folder / "step-3", folder / "step-3.replaced");  // a kill between the two renames
  EXPECT_EQ(find_latest(folder.path()).found->path, folder / "step-3.replaced");
  run.step(0);
  save(run, {.folder = folder.path()}, 4);
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"step-3", "step-4"}));
}

// E12.
TEST(FindLatest, TakesTheNewestCompleteAndWarns) {
  const TempFolder folder;
  EXPECT_FALSE(find_latest(folder / "absent").found);
  EXPECT_FALSE(find_latest(folder.path()).found);
  ToyRun run;
  for (int step : {2, 9, 10, 11, 12, 13}) save(run, {.folder = folder.path()}, step);
  fs::remove(folder / "step-10/COMPLETE");
  fs::remove(folder / "step-11/manifest.json");
  fs::resize_file(folder / "step-12/master-00000.safetensors", 100);
  std::ofstream(folder / "step-13/manifest.json", std::ios::app) << " ";
  fs::create_directory(folder / "step-14.partial");
  const LatestCheckpoint latest = find_latest(folder.path());
  ASSERT_TRUE(latest.found);
  EXPECT_TRUE(latest.damaged);
  EXPECT_EQ(latest.found->step, 9);
  ASSERT_EQ(latest.warnings.size(), 5u);
  EXPECT_SAYS(latest.warnings[0], "step-14.partial: passed over: a save that was interrupted");
  EXPECT_SAYS(latest.warnings[1], "its checksum is not the one in COMPLETE");
  EXPECT_SAYS(latest.warnings[2], "master-00000.safetensors: has 100 bytes");
  EXPECT_SAYS(latest.warnings[3], "manifest.json");
  EXPECT_SAYS(latest.warnings[4], "not a complete checkpoint (no file COMPLETE)");
  EXPECT_SAYS(error_of([&] { load(run, folder / "step-10"); }), "not a complete checkpoint");
  EXPECT_SAYS(error_of([&] { load(run, folder / "step-77"); }), "step-77: is not a folder");
}

// E13.
TEST(Checkpoint, WeightsThatNeverTrainedHaveNoStateAndResume) {
  const TempFolder folder;
  ToyRun frozen({.freeze = true});
  frozen.step(0);
  save(frozen, {.folder = folder.path()}, 1);
  ToyRun resumed({.freeze = true, .seed = 8});
  load(resumed, folder / "step-1");
  EXPECT_EQ(resumed.fingerprint(), frozen.fingerprint());
  ToyRun thawed;  // the weight trains from now on, from zero state, in another layout of units
  thawed.step(5);
  load(thawed, folder / "step-1");
  EXPECT_EQ(thawed.fingerprint(), frozen.fingerprint());
  const ToyRun fresh;
  ToyRun before_any_step({.seed = 6});  // no state at all
  before_any_step.step(0);
  ToyRun untrained;
  save(untrained, {.folder = folder.path()}, 2);
  load(before_any_step, folder / "step-2");
  EXPECT_EQ(before_any_step.fingerprint(), fresh.fingerprint());
}

TEST(Checkpoint, LoadsIntoAnotherLayoutOfUnits) {
  const TempFolder folder;
  ToyRun run;
  run.step(0);
  save(run, {.folder = folder.path()}, 1);
  ToyRun other({.one_block = true, .seed = 2});
  load(other, folder / "step-1");
  EXPECT_EQ(other.fingerprint(), run.fingerprint());
}

// The checkpoint `from` as several ranks would have saved it: every weight cut at multiples of `step`
// elements, over two files.
void cut(const fs::path& from, const fs::path& to, int64_t step) {
  fs::create_directory(to);
  Manifest manifest = read_manifest(from);
  Manifest out = manifest;
  out.files.clear();
  out.slices.clear();
  std::vector<std::unique_ptr<SafetensorsFile>> sources;
  for (const SavedFile& file : manifest.files)
    sources.push_back(std::make_unique<SafetensorsFile>(from / file.name));
  std::map<std::pair<std::string, int64_t>, std::vector<TensorView>> files;  // (state, piece) -> tensors
  std::map<std::pair<std::string, int64_t>, std::vector<SavedSlice>> slices;
  for (const SavedSlice& slice : manifest.slices) {
    for (int64_t at = 0, piece = 0; at < slice.piece.end; at += step, ++piece) {
      TensorView view = sources[slice.file]->at(slice.weight);
      const int64_t width = size_of(view.dtype), end = std::min(at + step, slice.piece.end);
      view.data += at * width;
      view.nbytes = static_cast<uint64_t>((end - at) * width);
      view.shape = {end - at};
      SavedSlice part = slice;
      part.piece.begin = at;
      part.piece.end = end;
      part.hashes = {Hash64::of({view.data, view.nbytes})};
      files[{slice.state, piece}].push_back(view);
      slices[{slice.state, piece}].push_back(part);
    }
  }
  for (const auto& [key, views] : files) {
    const std::string name = fmt::format("{}-{:05}.safetensors", key.first, key.second);
    write_safetensors(to / name, views);
    const std::string bytes = read_file(to / name);
    uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    out.files.push_back({name, bytes.size(), Hash64::of(std::as_bytes(std::span(bytes)).first(8 + header))});
    for (SavedSlice part : slices[key]) {
      part.file = out.files.size() - 1;
      out.slices.insert(out.slices.begin(), part);  // any order
    }
  }
  write_manifest(to, out);
  mark_complete(to);
}

TEST(Checkpoint, LoadsSlicesOfAnyLayout) {
  const TempFolder folder;
  ToyRun run;
  run.step(0);
  save(run, {.folder = folder.path()}, 1);
  for (int64_t step : {1999, 700, 64, 37}) {
    const fs::path path = folder / fmt::format("cut-{}", step);
    cut(folder / "step-1", path, step);
    ToyRun other({.one_block = step == 700, .seed = 2});
    load(other, path);
    EXPECT_EQ(other.fingerprint(), run.fingerprint()) << step;
  }
}

TEST(Checkpoint, MastersAloneForANewRun) {
  const TempFolder folder;
  ToyRun run;
  run.step(0);
  save(run, {.folder = folder.path()}, 1);
  ToyRun other({.optimizer = {.name = "SGD"}, .seed = 5});
  Checkpointer(*other.store, other.optimizer.get(), {.folder = folder.path()})
      .load_masters(folder / "step-1");
  EXPECT_TRUE(at::equal(other.param("a.weight"), run.param("a.weight")));
  EXPECT_EQ(other.optimizer->updates(), 0);
  Checkpointer(*run.store, nullptr, {.folder = folder.path()}).save(2, {});
  EXPECT_SAYS(error_of([&] { load(run, folder / "step-2"); }), "holds no optimizer state");
}

// After a refused load the run is as it was.
void expect_refused(ToyRun& run, const fs::path& path, const std::string& part) {
  const std::string before = run.fingerprint();
  const std::string error = error_of([&] { load(run, path); });
  EXPECT_SAYS(error, "BadCheckpoint: ");
  EXPECT_SAYS(error, part);
  EXPECT_EQ(run.fingerprint(), before) << error;
}

TEST(BadCheckpoints, OtherDtypesAndOptimizersAreNamed) {
  const TempFolder folder;
  ToyRun run;
  run.step(0);
  save(run, {.folder = folder.path()}, 1);
  const fs::path path = folder / "step-1";
  ToyRun wide({.dtypes = {at::kDouble, at::kDouble, at::kDouble}});
  expect_refused(wide, path, "was saved as float32, this run keeps it as float64 ([training] dtype)");
  ToyRun narrow({.optimizer = {.state_dtype = at::kBFloat16}});
  expect_refused(narrow, path,
                 "was saved as float32, this run keeps it as bfloat16 ([optimizer] state_dtype)");
  ToyRun sgd({.optimizer = {.name = "SGD"}});
  expect_refused(sgd, path, "holds the state of the optimizer AdamW, this run has SGD");
  ToyRun shape({.width = 41});
  expect_refused(shape, path, "has shape [50, 40], the model wants [50, 41]");
}

TEST(BadCheckpoints, EveryFlippedByteIsFoundAndNamed) {
  const TempFolder folder;
  ToyRun run, other({.seed = 2});
  run.step(0);
  other.step(0);
  save(run, {.folder = folder.path()}, 1);
  const fs::path path = folder / "step-1";
  for (const std::string& name : names_in(path)) {
    const std::string good = read_file(path / name);
    const size_t stride = good.size() / 40 + 1;
    for (size_t at = 0; at < good.size(); at += at < 24 ? 1 : stride) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 4);
      put(path / name, bad);
      expect_refused(other, path, name == "COMPLETE" ? "manifest.json" : name);
    }
    for (size_t size : {size_t{0}, size_t{7}, good.size() / 2, good.size() - 1}) {
      put(path / name, good.substr(0, size));
      expect_refused(other, path, name == "COMPLETE" ? "manifest.json" : name);
    }
    put(path / name, good + "12345678");
    expect_refused(other, path, name == "COMPLETE" ? "manifest.json" : name);
    fs::remove(path / name);
    expect_refused(other, path, name);
    put(path / name, good);
  }
  load(other, path);
  EXPECT_EQ(other.fingerprint(), run.fingerprint());
}

TEST(BadCheckpoints, LyingManifests) {
  const TempFolder folder;
  ToyRun run, other({.seed = 2});
  run.step(0);
  other.step(0);
  save(run, {.folder = folder.path()}, 1);
  const fs::path path = folder / "step-1";
  const Json good = read_json(path / "manifest.json");
  const auto lie = [&](const std::function<void(Json&)>& change, const std::string& part) {
    Json bad = good;
    change(bad);
    write_file(path / "manifest.json", bad.dump());
    mark_complete(path);
    SCOPED_TRACE(part);
    expect_refused(other, path, part);
  };
  lie([](Json& m) { m["format"] = "something"; }, "manifest.json: is not a titanium checkpoint");
  lie([](Json& m) { m["version"] = 3; }, "version 3, this program reads versions 1 to 2");
  lie([](Json& m) { m["version"] = 0; }, "version 0, this program reads versions 1 to 2");
  lie([](Json& m) { m["version"] = "1"; }, "'version' is \"1\"");
  lie([](Json& m) { m = Json::array(); }, "has no 'format'");
  for (const char* key : {"step", "optimizer", "train", "files", "slices"}) {
    lie([&](Json& m) { m.erase(key); }, fmt::format("has no '{}'", key));
  }
  lie([](Json& m) { m["step"] = -1; }, "'step' is -1");
  lie([](Json& m) { m["step"] = 1e30; }, "'step' is 1e+30");
  lie([](Json& m) { m["optimizer"]["updates"] = 18446744073709551615u; },
      "expected an integer from 0 to 2^63-1");
  lie([](Json& m) { m["files"] = 3; }, "'files' is a number, expected a list");
  lie([](Json& m) { m["files"][0]["name"] = "../master-00000.safetensors"; },
      "a plain name in the same folder");
  lie([](Json& m) { m["files"][0]["name"] = "absent"; }, "absent: No such file");
  lie([](Json& m) { m["files"][0]["size"] = 5; }, "5 were saved");
  lie([](Json& m) { m["files"][0]["header_xxh64"] = "0"; }, "expected 16 hex digits");
  lie([](Json& m) { m["files"][0]["header_xxh64"] = "0000000000000000"; },
      "the header is not the one that was saved");
  lie([](Json& m) { m["slices"][0]["file"] = 3; }, "'file' is 3, there are 3 files");
  lie([](Json& m) { m["slices"][0]["file"] = 1; }, "");
  lie([](Json& m) { m["slices"][0]["dtype"] = "I32"; }, "dtype 'I32' is not known");
  lie([](Json& m) { m["slices"][0]["dtype"] = "BF16"; },
      "was saved as bfloat16, this run keeps it as float32");
  lie([](Json& m) { m["slices"][0]["shape"] = {4294967296, 4294967296}; }, "the shape overflows");
  lie([](Json& m) { m["slices"][0]["shape"] = {40, 50}; }, "has shape [40, 50], the model wants [50, 40]");
  lie([](Json& m) { m["slices"][0]["range"] = {0, 2001}; }, "range [0,2001] of a weight of 2000 elements");
  lie([](Json& m) { m["slices"][0]["range"] = {5, 5}; }, "range [5,5]");
  lie([](Json& m) { m["slices"][0]["range"] = {0}; }, "range [0]");
  lie([](Json& m) { m["slices"][0]["columns"] = {0, 41}; }, "columns [0,41] of a weight of shape [50,40]");
  lie([](Json& m) { m["slices"][0]["columns"] = {7, 7}; }, "columns [7,7]");
  lie([](Json& m) { m["slices"][0]["columns"] = {-1, 7}; }, "'columns' is -1");
  lie([](Json& m) { m["slices"][0]["columns"] = {0, 39}; }, "range [0,2000] of a weight of 1950 elements");
  lie([](Json& m) { m["slices"][0]["xxh64"] = std::string(32, '0'); }, "expected 16 hex digits");
  lie([](Json& m) { m["slices"][0]["range"] = {0, 1999}; }, "the manifest says 1999 elements");
  lie([](Json& m) { m["slices"][0]["xxh64"] = "0000000000000000"; }, "its checksum differs");
  lie([](Json& m) { m["slices"].push_back(m["slices"][0]); }, "is saved twice from element 0 on");
  lie([](Json& m) { m["slices"].erase(0); },
      "has no 'master' of the weight 'model.embed_tokens.weight' of shape [50, 40]");
  lie([](Json& m) { m["slices"][0]["weight"] = "other"; }, "holds the weight 'other'");
  lie([](Json& m) { m["slices"][1]["state"] = "momentum_buffer"; }, "holds 'momentum_buffer'");
}

TEST(BadCheckpoints, PartsThatDoNotCoverAWeight) {
  const TempFolder folder;
  ToyRun run, other({.seed = 2});
  run.step(0);
  other.step(0);
  save(run, {.folder = folder.path()}, 1);
  cut(folder / "step-1", folder / "cut", 700);
  Json manifest = read_json(folder / "cut/manifest.json");
  auto& slices = manifest["slices"];
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices[i]["weight"] == "a.weight" && slices[i]["state"] == "exp_avg" &&
        slices[i]["range"][0] == 700) {
      slices.erase(i);
      break;
    }
  }
  write_file(folder / "cut/manifest.json", manifest.dump());
  mark_complete(folder / "cut");
  expect_refused(other, folder / "cut",
                 "'exp_avg' of the weight 'a.weight' is not whole: elements from 700 on are missing");
}

}  // namespace
}  // namespace titanium
