// Saving and loading a checkpoint of 2 GB beside dd on the same disk, in turns; and what an async save costs
// the training thread.
//   bench_checkpoint FOLDER [ROUNDS]
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>

#include "bench/timing.h"
#include "titanium/optim/optimizer.h"
#include "titanium/weights/checkpoint.h"

using namespace titanium;
namespace fs = std::filesystem;

namespace {

void run(const std::string& command) {
  if (std::system(command.c_str()) != 0) throw std::runtime_error(command + ": failed");
}

// Out of the page cache, so that a read comes from the disk.
void evict(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
  ::close(fd);
}
void evict_folder(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) evict(entry.path());
}

void report(const char* name, const std::vector<double>& ours, const std::vector<double>& peer,
            double bytes) {
  const double a = bytes / median(ours) / 1e9, b = bytes / median(peer) / 1e9;
  fmt::print("{} ours {:.3f} peer {:.3f} ratio {:.3f} GB/s\n", name, a, b, a / b);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print("usage: bench_checkpoint FOLDER [ROUNDS]\n");
    return 2;
  }
  const fs::path folder = fs::path(argv[1]) / "bench-checkpoint";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  fs::create_directories(folder);
  constexpr int kUnits = 40;
  WeightTable table;
  for (int i = 0; i < kUnits; ++i) table.add(fmt::format("w{}", i), {4096, 1024}, Split::kRows, {}, i);
  ParamStore store(table, kUnits, {});
  store.init(1);
  store.zero_grad();
  AdamW optimizer(store, {});
  optimizer.step({.lr = 1e-3});
  const double bytes = static_cast<double>(store.parameters()) * 12;
  fmt::print("{:.2f} GB of masters and state in {} units, {} rounds\n", bytes / 1e9, kUnits, rounds);

  Checkpointer checkpointer(store, &optimizer, {.folder = folder, .keep_latest_k = 1});
  const std::string raw = (folder / "dd.bin").string();
  std::vector<double> save, write, load, read, warm_load, warm_read, call, slowed, alone;
  const UpdateOptions update{.lr = 1e-6};
  for (int round = 0; round <= rounds; ++round) {  // the first warms up
    ::sync();
    const double s = seconds([&] {
      checkpointer.save(1, {});
      checkpointer.wait();
    });
    ::sync();
    const double w = seconds([&] {
      run(fmt::format("dd if=/dev/zero of={} bs=1M count={} conv=fsync status=none", raw,
                      static_cast<int64_t>(bytes) >> 20));
    });
    const double wr = seconds([&] { run(fmt::format("dd if={} of=/dev/null bs=1M status=none", raw)); });
    const double wl = seconds([&] { checkpointer.load(folder / "step-1"); });
    evict_folder(folder / "step-1");
    evict(raw);
    const double l = seconds([&] { checkpointer.load(folder / "step-1"); });
    const double r = seconds([&] { run(fmt::format("dd if={} of=/dev/null bs=1M status=none", raw)); });
    fs::remove(raw);
    // An update right after an async save: it copies what is not written.
    const double a = seconds([&] { optimizer.step(update); });
    const double c = seconds([&] { checkpointer.save(1, {}); });
    const double u = seconds([&] { optimizer.step(update); });
    checkpointer.wait();
    if (round == 0) continue;
    save.push_back(s);
    write.push_back(w);
    load.push_back(l);
    read.push_back(r);
    warm_load.push_back(wl);
    warm_read.push_back(wr);
    alone.push_back(a);
    call.push_back(c);
    slowed.push_back(u);
  }
  fs::remove_all(folder);
  fmt::print("async save: the call {:.2f} ms, the next update {:.1f} ms, an update alone {:.1f} ms\n",
             median(call) * 1e3, median(slowed) * 1e3, median(alone) * 1e3);
  fmt::print("load from the page cache: {:.2f} GB/s (dd to /dev/null {:.2f})\n",
             bytes / median(warm_load) / 1e9, bytes / median(warm_read) / 1e9);
  report("checkpoint_save", save, write, bytes);
  report("checkpoint_load", load, read, bytes);
  return 0;
}
