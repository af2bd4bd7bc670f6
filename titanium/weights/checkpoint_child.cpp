// A process for checkpoint_process_test.cpp to kill, and to run out of disk.
//   train FOLDER STEPS KILL  resumes, trains to STEPS with an async save after every step, kills itself at
//   the KILL-th stage of its
//                            saves (-1: never), prints the fingerprint at the end
//   limit FOLDER BYTES       saves step 1, then step 2 while no file may grow beyond BYTES
//   disk MOUNT               the same on a tmpfs of its own with ever less free space; prints "not permitted"
//   where it cannot mount
//   ranks MOUNT              the same with four ranks
#include <fmt/format.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/weights/checkpoint.h"
#include "titanium/weights/toy_ranks.h"
#include "titanium/weights/toy_run.h"

using namespace titanium;
using testing::ToyRun;

namespace {

int train(const std::filesystem::path& folder, int64_t steps, int kill_at) {
  ToyRun run;
  CheckpointOptions options{.folder = folder, .keep_latest_k = 2};
  int stages = 0;
  options.on_stage = [&](std::string_view) {
    if (stages++ == kill_at) kill(getpid(), SIGKILL);
  };
  Checkpointer checkpointer(*run.store, run.optimizer.get(), options);
  int64_t step = 0;
  if (const LatestCheckpoint latest = find_latest(folder); latest.found) {
    step = checkpointer.load(latest.found->path).train.at("next").get<int64_t>();
  }
  while (step < steps) {
    run.step(step++);
    checkpointer.save(step, {{"next", step}});
  }
  checkpointer.wait();
  fmt::print("{}\n", run.fingerprint());
  return 0;
}

// What a failed save of step 2 must leave: an error that says path and reason, and step 1.  Then a save that
// works.
bool fails_well(const std::filesystem::path& folder, const char* reason, const std::function<void()>& lift) {
  ToyRun run;
  run.step(0);
  Checkpointer checkpointer(*run.store, run.optimizer.get(), {.folder = folder, .keep_latest_k = 1});
  checkpointer.save(2, {});
  run.step(1);
  bool failed = false;
  try {
    checkpointer.wait();
  } catch (const BadCheckpoint& error) {
    failed = true;
    const std::string text = error.what();
    if (text.find(reason) == text.npos || text.find(folder.string()) == text.npos) {
      fmt::print("the message says neither path nor reason: {}\n", text);
      return false;
    }
  }
  const LatestCheckpoint latest = find_latest(folder);
  if (!latest.found || latest.found->step != (failed ? 1 : 2)) {
    fmt::print("after a save that {} the newest checkpoint is not the right one\n",
               failed ? "failed" : "worked");
    return false;
  }
  ToyRun other;
  Checkpointer(*other.store, other.optimizer.get(), {.folder = folder}).load(latest.found->path);
  lift();
  checkpointer.save(3, {});
  checkpointer.wait();
  if (find_latest(folder).found->step != 3) return false;
  fmt::print("{}\n", failed ? "failed" : "worked");
  return true;
}

void save_first(const std::filesystem::path& folder) {
  ToyRun run;
  run.step(0);
  Checkpointer checkpointer(*run.store, run.optimizer.get(), {.folder = folder});
  checkpointer.save(1, {});
  checkpointer.wait();
}

int limit(const std::filesystem::path& folder, rlim_t bytes) {
  save_first(folder);
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{bytes, before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  return fails_well(folder, "File too large", [&] { setrlimit(RLIMIT_FSIZE, &before); }) ? 0 : 1;
}

// Four ranks save step 2 on what space there is.
bool ranks_fail_well(const std::filesystem::path& folder, const std::function<void()>& lift) {
  std::vector<std::string> errors(4);
  testing::on_ranks({1, 2, 2}, [&](testing::ToyRank& rank) {
    rank.fill();
    Checkpointer checkpointer(*rank.store, rank.optimizer.get(), {.folder = folder, .keep_latest_k = 1});
    checkpointer.save(2, {});
    rank.spoil();
    try {
      checkpointer.wait();
    } catch (const BadCheckpoint& error) {
      errors[rank.mesh.rank()] = error.what();
    }
    const auto latest = find_latest(folder, rank.mesh.all());
    checkpointer.load(latest.found->path);
    if (rank.wrong() != "" || latest.found->step != (errors[rank.mesh.rank()].empty() ? 2 : 1))
      errors[rank.mesh.rank()] += "?";
    if (rank.mesh.rank() == 0) lift();
    rank.mesh.all().barrier();
    checkpointer.save(3, {});
    checkpointer.wait();
  });
  const bool failed = !errors[0].empty();
  fmt::print("{}\n", failed ? "failed" : "worked");
  if (failed && errors[0].find("No space left on device") == std::string::npos) errors[0] += "?";
  for (const std::string& error : errors) {
    if (error == errors[0] && !error.ends_with("?")) continue;
    fmt::print("a rank says: {}\n", error);
    return false;
  }
  return find_latest(folder).found->step == 3;
}

// In a mount namespace of this process, so that nothing stays.
bool mount_small(const std::filesystem::path& mount_point) {
  if (unshare(CLONE_NEWNS) == 0 && mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
      mount("tmpfs", mount_point.c_str(), "tmpfs", 0, "size=512k") == 0)
    return true;
  fmt::print("not permitted\n");
  return false;
}

void fill_disk(const std::filesystem::path& filler, int free_pages) {
  std::ofstream out(filler, std::ios::binary);
  const std::string page(4096, 'x');
  while (std::filesystem::space(filler.parent_path()).available > static_cast<uintmax_t>(free_pages) * 4096) {
    if (!out.write(page.data(), 4096).flush()) break;
  }
}

int disk(const std::filesystem::path& mount_point, bool many_ranks) {
  if (!mount_small(mount_point)) return 0;
  for (int free_pages = 0; free_pages <= (many_ranks ? 60 : 40); free_pages += many_ranks ? 3 : 1) {
    const auto folder = mount_point / "checkpoints", filler = mount_point / "filler";
    std::filesystem::remove_all(folder);
    const auto lift = [&] { std::filesystem::remove(filler); };
    if (many_ranks) {
      testing::on_ranks({1, 2, 2}, [&](testing::ToyRank& rank) {
        rank.fill();
        Checkpointer(*rank.store, rank.optimizer.get(), {.folder = folder}).save(1, {});
      });
    } else {
      save_first(folder);
    }
    fill_disk(filler, free_pages);
    if (!(many_ranks ? ranks_fail_well(folder, lift) : fails_well(folder, "No space left on device", lift)))
      return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 2 ? argv[1] : "";
  if (mode == "train" && argc == 5) return train(argv[2], std::atoll(argv[3]), std::atoi(argv[4]));
  if (mode == "limit" && argc == 4) return limit(argv[2], static_cast<rlim_t>(std::atoll(argv[3])));
  if ((mode == "disk" || mode == "ranks") && argc == 3) return disk(argv[2], mode == "ranks");
  return 2;
}
