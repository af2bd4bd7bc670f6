// Saves that are killed, and saves on a disk that is full: in processes of their own.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>

#include "titanium/formats/test_util.h"
#include "titanium/weights/checkpoint.h"
#include "titanium/weights/toy_run.h"

namespace titanium {
namespace {

using testing::TempFolder;
using testing::ToyRun;

struct Result {
  int status;  // as waitpid gives it
  std::string output;
};

Result child(const std::string& arguments) {
  const std::string command = "exec " TITANIUM_BINARY_DIR "/checkpoint_child " + arguments;
  FILE* pipe = popen(command.c_str(), "r");
  std::string output;
  std::array<char, 4096> buffer;
  while (const size_t n = fread(buffer.data(), 1, buffer.size(), pipe)) output.append(buffer.data(), n);
  return {pclose(pipe), output};
}

TEST(KilledSave, AtEachStageThenResumedIsBitwiseTheStraightRun) {
  constexpr int64_t kSteps = 17;
  std::vector<std::string> straight;  // the fingerprint after each number of steps
  ToyRun run;
  straight.push_back(run.fingerprint());
  for (int64_t step = 0; step < kSteps; ++step) {
    run.step(step);
    straight.push_back(run.fingerprint());
  }

  // A save has 11 stages: files, 3 units, 3 closes, manifest, complete, rename, prune.  The first process
  // dies in its first save, each later one in its second, one stage later each time.
  const TempFolder folder;
  int64_t last = 0;
  for (int k = 0; k <= 11; ++k) {
    const int kill_at = k == 0 ? 2 : 11 + k - 1;
    const Result result = child(fmt::format("train {} {} {}", folder.path().string(), kSteps, kill_at));
    ASSERT_TRUE(WIFSIGNALED(result.status) && WTERMSIG(result.status) == SIGKILL)
        << result.status << result.output;
    const LatestCheckpoint latest = find_latest(folder.path());
    if (k == 0) {
      EXPECT_FALSE(latest.found);
      EXPECT_EQ(latest.warnings.size(), 1u);  // the wreck
      continue;
    }
    ASSERT_TRUE(latest.found) << "killed at stage " << kill_at;
    EXPECT_EQ(latest.found->step, last + (k == 11 ? 2 : 1)) << "killed at stage " << kill_at;
    last = latest.found->step;
    ToyRun loaded({.seed = 9});
    Checkpointer(*loaded.store, loaded.optimizer.get(), {.folder = folder.path()}).load(latest.found->path);
    EXPECT_EQ(loaded.fingerprint(), straight.at(last));
  }
  const Result end = child(fmt::format("train {} {} -1", folder.path().string(), kSteps));
  EXPECT_EQ(end.status, 0);
  EXPECT_EQ(end.output, straight.back() + "\n");
  EXPECT_EQ(folder.files(), 2u);  // keep_latest_k, and no wreck
}

TEST(FailedSave, FileSizeLimitGivesAnErrorAndKeepsTheOlder) {
  // Below a header, within the tensors, within the manifest.
  for (int bytes : {100, 5000, 20000}) {
    const TempFolder folder;
    const Result result = child(fmt::format("limit {} {}", folder.path().string(), bytes));
    EXPECT_EQ(result.status, 0) << result.output;
    EXPECT_EQ(result.output, bytes < 20000 ? "failed\n" : "worked\n");
  }
}

TEST(FailedSave, FullDiskGivesAnErrorAndKeepsTheOlder) {
  for (const char* mode : {"disk ", "ranks "}) {
    const TempFolder folder;
    const Result result = child(mode + folder.path().string());
    EXPECT_EQ(result.status, 0) << mode << result.output;
    if (result.output == "not permitted\n") continue;  // the file size limit stands for it
    EXPECT_SAYS(result.output, "failed\n");
    EXPECT_SAYS(result.output, "worked\n");
  }
}

}  // namespace
}  // namespace titanium
