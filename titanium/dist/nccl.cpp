#include "titanium/dist/nccl.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <fmt/ranges.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/gloo.h"
#include "titanium/dist/rank_watch.h"
#include "titanium/dist/transport.h"

namespace titanium {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;

bool is_half(const at::Tensor& flat) {
  return flat.scalar_type() == at::kBFloat16 || flat.scalar_type() == at::kHalf;
}

class NcclTransport final : public Transport {
 public:
  // The group of the host's tensors has the same ranks; `world` keeps the watch.
  NcclTransport(std::shared_ptr<WatchedWorld> world, Group host,
                c10::intrusive_ptr<c10d::ProcessGroupNCCL> group, std::vector<int> ranks, std::string name)
      : world_(std::move(world)), host_(std::move(host)), group_(std::move(group)), ranks_(std::move(ranks)) {
    call_.channel = std::move(name);
    others_ = ranks_;
    others_.erase(others_.begin() + host_.rank());
  }

  int rank() const override { return host_.rank(); }
  int size() const override { return host_.size(); }

  void all_gather(const at::Tensor& flat) override {
    if (flat.is_cpu()) return host_.all_gather(flat);
    run("an all_gather", flat, [&] {
      at::Tensor out = flat, in = own(flat);
      return backend()._allgather_base(out, in, {});
    });
  }

  void reduce_scatter(const at::Tensor& flat) override {
    if (flat.is_cpu()) return host_.reduce_scatter(flat);
    at::Tensor wide = is_half(flat) ? flat.to(at::kFloat) : flat;
    run("a reduce_scatter", flat, [&] {
      at::Tensor out = own(wide);
      return backend()._reduce_scatter_base(out, wide, {});
    });
    if (is_half(flat)) own(flat).copy_(own(wide));
  }

  void all_reduce(const at::Tensor& flat, ReduceOp op) override {
    if (flat.is_cpu()) return host_.all_reduce(flat, op);
    const bool half_sum = op == ReduceOp::kSum && is_half(flat);
    std::vector<at::Tensor> tensors = {half_sum ? flat.to(at::kFloat) : flat};
    c10d::AllreduceOptions options;
    options.reduceOp = op == ReduceOp::kSum   ? c10d::ReduceOp::SUM
                       : op == ReduceOp::kMax ? c10d::ReduceOp::MAX
                                              : c10d::ReduceOp::MIN;
    run("an all_reduce", flat, [&] { return group_->allreduce(tensors, options); });
    if (half_sum) flat.copy_(tensors[0]);
  }

  void broadcast(const at::Tensor& flat, int root) override {
    if (flat.is_cpu()) return host_.broadcast(flat, root);
    std::vector<at::Tensor> tensors = {flat};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    run("a broadcast", flat, [&] { return group_->broadcast(tensors, options); });
  }

  std::vector<std::string> exchange(const std::string& mine) override { return host_.exchange(mine); }
  void barrier() override { host_.barrier(); }

 private:
  // By the base class: 2.15 has other names for these, and keeps the old ones there alone.
  c10d::Backend& backend() { return *group_; }

  at::Tensor own(const at::Tensor& flat) const {
    const int64_t part = flat.numel() / size();
    return flat.view({-1}).narrow(0, rank() * part, part);
  }

  // Starts it, and returns when the device has done it.  The thread looks, instead of waiting in the driver,
  // where a rank that never comes would keep it.
  template <typename Start>
  void run(const char* call, const at::Tensor& flat, const Start& start) {
    RankWatch& watch = world_->watch();
    ++call_.number;
    call_.what = fmt::format("{} of {} bytes ({}) over ranks {}", call, flat.nbytes(),
                             at::toString(flat.scalar_type()), fmt::join(ranks_, " "));
    std::atomic<bool> given_up = false;
    const RankWatch::Wait waiting(watch, others_, call_, [&] { given_up = true; });
    const c10::DeviceGuard device(flat.device());
    const Clock::time_point begin = Clock::now();
    try {
      const c10::intrusive_ptr<c10d::Work> work = start();
      while (!work->isCompleted()) {
        const Clock::duration waited = Clock::now() - begin;
        if (given_up) {
          group_->abort();
          watch.check();
          watch.lost(others_,
                     fmt::format("did not come within {:g} s (comm.train_timeout_seconds)",
                                 watch.timeout().count() / 1e3),
                     call_.what);
        }
        if (waited < milliseconds(1)) {
          std::this_thread::yield();
        } else {
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
      }
      work->wait();  // what it threw; the current stream goes on behind it
    } catch (const Error&) {
      throw;
    } catch (const std::exception& e) {
      const std::string text = e.what();
      watch.lost(others_, "ended or was killed (NCCL: " + text.substr(0, text.find('\n')) + ")", call_.what);
    }
  }

  std::shared_ptr<WatchedWorld> world_;
  Group host_;
  c10::intrusive_ptr<c10d::ProcessGroupNCCL> group_;
  std::vector<int> ranks_, others_;
  RankWatch::Call call_;
};

class NcclWorld final : public World {
 public:
  NcclWorld(const CommConfig& comm, int rank, int size, const std::string& addr, int port)
      : world_(watched_gloo_world(comm, rank, size, addr, port)) {
    // Which rank is lost and when to give up is the watch's: c10d's own would end the process.
    setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", 1);
    setenv("TORCH_NCCL_ENABLE_MONITORING", "0", 1);
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.waitWorkers = false;
    options.timeout = world_->watch().timeout();
    try {
      store_ = c10::make_intrusive<c10d::TCPStore>(addr, options);
    } catch (const std::exception& e) {
      world_->watch().lost({0}, "ended or was killed", "the making of NCCL's groups");
    }
    const char* const attempt = std::getenv("TORCHELASTIC_RESTART_COUNT");
    attempt_ = attempt == nullptr ? "" : attempt;
  }

  int rank() const override { return world_->rank(); }
  int size() const override { return world_->size(); }

  Group group(const std::vector<int>& ranks, const std::string& purpose) override {
    const Group host = world_->group(ranks, purpose);
    if (host.size() == 1) return host;
    const std::lock_guard lock(mutex_);
    Group& group = groups_[{ranks, purpose}];
    if (group.size() == 1) {
      const std::string name = fmt::format("nccl/{}/{}/{}", attempt_, fmt::join(ranks, ","), purpose);
      auto options = c10d::ProcessGroupNCCL::Options::create();
      options->timeout = std::chrono::hours(24 * 365);  // see above
      group = Group(std::make_shared<NcclTransport>(
          world_, host,
          c10::make_intrusive<c10d::ProcessGroupNCCL>(c10::make_intrusive<c10d::PrefixStore>(name, store_),
                                                      host.rank(), host.size(), options),
          ranks, name));
    }
    return group;
  }

  void progress(int64_t step, std::string_view action) override { world_->progress(step, action); }
  void fail(const std::string& reason) noexcept override { world_->fail(reason); }

 private:
  std::shared_ptr<WatchedWorld> world_;
  Store store_;
  std::string attempt_;
  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, std::string>, Group> groups_;
};

}  // namespace

std::shared_ptr<World> nccl_world(const CommConfig& comm, int rank, int size, const std::string& addr,
                                  int port) {
  if (size == 1 && rank == 0) return solo_world();
  return std::make_shared<NcclWorld>(comm, rank, size, addr, port);
}

}  // namespace titanium
