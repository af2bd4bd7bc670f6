#include "titanium/dist/local.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string_view>
#include <utility>

#include "titanium/base/error.h"
#include "titanium/dist/local_memory.h"
#include "titanium/dist/local_reduce.h"
#include "titanium/dist/transport.h"

namespace titanium {
namespace {

enum class Call : uint32_t { kAllGather, kReduceScatter, kAllReduce, kBroadcast, kExchange, kBarrier };

std::string_view name(uint32_t call) {
  constexpr std::string_view kNames[] = {"an all_gather", "a reduce_scatter", "an all_reduce",
                                         "a broadcast",   "an exchange",      "a barrier"};
  return call < std::size(kNames) ? kNames[call] : "nothing known";
}

constexpr int64_t kOneRound = 16 << 10;  // bytes; below, all ranks take the whole sum: one round, not two

class LocalTransport final : public Transport {
 public:
  LocalTransport(std::shared_ptr<LocalEnd> end, std::vector<int> ranks, const std::string& purpose)
      : end_(std::move(end)),
        ranks_(std::move(ranks)),
        rank_(static_cast<int>(std::find(ranks_.begin(), ranks_.end(), end_->rank()) - ranks_.begin())),
        channel_(end_->channel(ranks_, purpose)),
        round_(me().read.value) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }

  void all_gather(const at::Tensor& flat) override {
    const int64_t part = bytes_of(flat) / size();
    begin(Call::kAllGather, flat);
    for (int64_t at = 0; at < part; at += kSlotBytes) {
      const int64_t bytes = std::min(kSlotBytes, part - at);
      post([&](std::byte* slot) { std::memcpy(slot, data(flat) + rank_ * part + at, bytes); });
      for (int other : others()) std::memcpy(data(flat) + other * part + at, posted(other), bytes);
      done();
    }
  }

  void reduce_scatter(const at::Tensor& flat) override {
    check_reducible(flat.scalar_type());
    const int64_t part = bytes_of(flat) / size();
    const int64_t piece = whole(kSlotBytes / size());
    begin(Call::kReduceScatter, flat);
    for (int64_t at = 0; at < part; at += piece) {
      const int64_t bytes = std::min(piece, part - at);
      post([&](std::byte* slot) {
        for (int other : others()) std::memcpy(slot + other * piece, data(flat) + other * part + at, bytes);
      });
      std::byte* mine = data(flat) + rank_ * part + at;
      reduce(
          flat, ReduceOp::kSum, mine, bytes, [&](int other) { return posted(other) + rank_ * piece; }, mine);
      done();
    }
  }

  void all_reduce(const at::Tensor& flat, ReduceOp op) override {
    check_reducible(flat.scalar_type());
    const int64_t total = bytes_of(flat);
    begin(Call::kAllReduce, flat);
    if (total <= kOneRound) {
      post([&](std::byte* slot) { std::memcpy(slot, data(flat), total); });
      reduce(
          flat, op, data(flat), total, [&](int other) { return posted(other); }, data(flat));
      return done();
    }
    // Each rank takes the sum of its piece of a chunk, then all get the pieces.
    for (int64_t at = 0; at < total; at += kSlotBytes) {
      std::byte* chunk = data(flat) + at;
      const int64_t bytes = std::min(kSlotBytes, total - at);
      const int64_t piece = whole((bytes + size() - 1) / size() + kLine - 1);
      const auto from = [&](int rank) { return std::min(bytes, rank * piece); };
      const auto length = [&](int rank) { return from(rank + 1) - from(rank); };
      post([&](std::byte* slot) {
        for (int other : others()) std::memcpy(slot + from(other), chunk + from(other), length(other));
      });
      std::byte* mine = chunk + from(rank_);
      reduce(
          flat, op, mine, length(rank_), [&](int other) { return posted(other) + from(rank_); }, mine);
      done();
      post([&](std::byte* slot) { std::memcpy(slot, mine, length(rank_)); });
      for (int other : others()) std::memcpy(chunk + from(other), posted(other), length(other));
      done();
    }
  }

  void broadcast(const at::Tensor& flat, int root) override {
    const int64_t total = bytes_of(flat);
    begin(Call::kBroadcast, flat);
    for (int64_t at = 0; at < total; at += kSlotBytes) {
      const int64_t bytes = std::min(kSlotBytes, total - at);
      post([&](std::byte* slot) {
        if (rank_ == root) std::memcpy(slot, data(flat) + at, bytes);
      });
      if (rank_ != root) std::memcpy(data(flat) + at, posted(root), bytes);
      done();
    }
  }

  std::vector<std::string> exchange(const std::string& mine) override {
    // The first round says how long each is, and holds the beginning.
    constexpr int64_t kFirst = kSlotBytes - static_cast<int64_t>(sizeof(uint64_t));
    const auto rest = [&](int64_t size, int64_t at) { return std::clamp<int64_t>(size - at, 0, kSlotBytes); };
    std::vector<std::string> all(size());
    all[rank_] = mine;
    const auto mine_size = static_cast<int64_t>(mine.size());
    int64_t longest = mine_size;
    begin(Call::kExchange, {});
    post([&](std::byte* slot) {
      std::memcpy(slot, &mine_size, sizeof mine_size);
      std::memcpy(slot + sizeof mine_size, mine.data(), std::min(kFirst, mine_size));
    });
    for (int other : others()) {
      const std::byte* slot = posted(other);
      int64_t bytes = 0;
      std::memcpy(&bytes, slot, sizeof bytes);
      all[other].resize(bytes);
      std::memcpy(all[other].data(), slot + sizeof bytes, std::min(kFirst, bytes));
      longest = std::max(longest, bytes);
    }
    done();
    for (int64_t at = kFirst; at < longest; at += kSlotBytes) {
      post([&](std::byte* slot) {
        if (mine_size > at) std::memcpy(slot, mine.data() + at, rest(mine_size, at));
      });
      for (int other : others()) {
        const std::byte* slot = posted(other);
        const auto bytes = static_cast<int64_t>(all[other].size());
        if (bytes > at) std::memcpy(all[other].data() + at, slot, rest(bytes, at));
      }
      done();
    }
    return all;
  }

  void barrier() override {
    begin(Call::kBarrier, {});
    post([](std::byte*) {});
    for (int other : others()) posted(other);
    done();
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes; whole elements of any dtype
  static int64_t whole(int64_t bytes) { return bytes / kLine * kLine; }
  static std::byte* data(const at::Tensor& flat) { return static_cast<std::byte*>(flat.data_ptr()); }
  static int64_t bytes_of(const at::Tensor& flat) { return static_cast<int64_t>(flat.nbytes()); }
  LocalMember& me() const { return channel_.members[rank_]; }
  const std::vector<int>& others() const { return others_; }

  void begin(Call call, const at::Tensor& flat) {
    end_->check();
    what_ = {.bytes = flat.defined() ? flat.nbytes() : 0,
             .call = static_cast<uint32_t>(call),
             .dtype = flat.defined() ? static_cast<uint32_t>(flat.scalar_type()) : 0};
    if (flat.defined() && !flat.is_cpu()) {
      throw Bug("{} on a tensor of {} over comm.transport local, which is for the CPU", name(what_.call),
                flat.device().str());
    }
  }

  // Writes this rank's slot of the round, once nobody reads what it held two rounds ago.
  template <typename Write>
  void post(const Write& write) {
    for (int other : others()) wait(channel_.members[other].read, round_ - 1, other);
    write(channel_.slot(rank_, round_));
    me().what[round_ % 2] = what_;
    me().posted.bump();
  }

  // What another rank posted in this round.
  const std::byte* posted(int other) {
    LocalMember& member = channel_.members[other];
    wait(member.posted, round_ + 1, other);
    const LocalMember::What what = member.what[round_ % 2];
    if (what != what_) {
      const std::string difference = fmt::format(
          "in the group of ranks {}, rank {} is at {} of {} bytes ({}), rank {} at {} of {} bytes ({})",
          fmt::join(ranks_, " "), ranks_[rank_], name(what_.call), what_.bytes,
          at::toString(static_cast<at::ScalarType>(what_.dtype)), ranks_[other], name(what.call), what.bytes,
          at::toString(static_cast<at::ScalarType>(what.dtype)));
      end_->fail(ranks_[rank_], "found a bug: " + difference);
      throw Bug("{}", difference);
    }
    return channel_.slot(other, round_);
  }

  void done() {
    me().read.bump();
    ++round_;
  }

  void wait(LocalCounter& counter, uint32_t target, int other) {
    end_->await(counter, target, ranks_[other], name(what_.call));
  }

  template <typename Row>
  void reduce(const at::Tensor& flat, ReduceOp op, std::byte* out, int64_t bytes, const Row& row,
              const std::byte* mine) {
    rows_.resize(size());
    for (int rank = 0; rank < size(); ++rank) rows_[rank] = rank == rank_ ? mine : row(rank);
    reduce_rows(flat.scalar_type(), op, out, rows_.data(), size(), bytes / flat.element_size());
  }

  std::vector<int> make_others() const {  // from the next one on, so that not all read of the same
    std::vector<int> others;
    for (int i = 1; i < size(); ++i) others.push_back((rank_ + i) % size());
    return others;
  }

  std::shared_ptr<LocalEnd> end_;
  std::vector<int> ranks_;
  int rank_;
  LocalChannel channel_;
  uint32_t round_;
  std::vector<int> others_ = make_others();
  LocalMember::What what_ = {};
  std::vector<const void*> rows_;
};

class LocalWorld final : public World {
 public:
  LocalWorld(std::shared_ptr<LocalMemory> memory, int rank, std::chrono::milliseconds timeout)
      : size_(memory->ranks()), end_(std::make_shared<LocalEnd>(std::move(memory), rank, timeout)) {}

  int rank() const override { return end_->rank(); }
  int size() const override { return size_; }

  Group group(const std::vector<int>& ranks, const std::string& purpose) override {
    const bool ascending =
        std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
    if (!ascending || ranks.empty() || ranks.front() < 0 || ranks.back() >= size_ ||
        std::find(ranks.begin(), ranks.end(), rank()) == ranks.end()) {
      throw Bug("rank {} of {} asks for the group of ranks {}", rank(), size_, fmt::join(ranks, " "));
    }
    if (ranks.size() == 1) return {};
    const std::lock_guard lock(mutex_);
    Group& group = groups_[{ranks, purpose}];
    if (group.size() == 1) group = Group(std::make_shared<LocalTransport>(end_, ranks, purpose));
    return group;
  }

  void progress(int64_t step, std::string_view action) override { end_->progress(step, action); }
  void fail(const std::string& reason) noexcept override {
    try {
      end_->fail(rank(), "failed: " + reason);
    } catch (const std::bad_alloc&) {
      end_->fail(rank(), "failed");
    }
  }

 private:
  int size_;
  std::shared_ptr<LocalEnd> end_;
  std::mutex mutex_;
  std::map<std::pair<std::vector<int>, std::string>, Group> groups_;
};

}  // namespace

std::shared_ptr<World> local_world(std::shared_ptr<LocalMemory> memory, int rank,
                                   std::chrono::milliseconds timeout) {
  return std::make_shared<LocalWorld>(std::move(memory), rank, timeout);
}

std::vector<std::shared_ptr<World>> local_worlds(int size, std::chrono::milliseconds timeout) {
  const std::shared_ptr<LocalMemory> memory = LocalMemory::create(size);
  std::vector<std::shared_ptr<World>> worlds;
  worlds.reserve(size);
  for (int rank = 0; rank < size; ++rank) worlds.push_back(local_world(memory, rank, timeout));
  return worlds;
}

}  // namespace titanium
