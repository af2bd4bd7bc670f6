#include "titanium/dist/wires.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "titanium/base/error.h"
#include "titanium/dist/local_reduce.h"

namespace titanium {
namespace {

constexpr size_t kLine = 64;          // bytes; whole elements of any dtype
constexpr size_t kPiece = 16 << 20;   // bytes of one transfer: a slow network is not a lost rank
constexpr size_t kScratch = 4 << 20;  // bytes received of all others before they are added
constexpr size_t kSmall = 64 << 10;   // bytes received at most where all ranks take the whole sum at once
constexpr size_t kHead = 256;         // bytes of the first message of an exchange

std::byte* data(const at::Tensor& flat) {
  return static_cast<std::byte*>(flat.data_ptr());
}

class WireTransport final : public Transport {
 public:
  explicit WireTransport(std::unique_ptr<Wires> wires)
      : wires_(std::move(wires)), rank_(wires_->rank()), size_(wires_->size()) {
    // From the next one on, so that not all send to the same.
    for (int i = 1; i < size_; ++i) others_.push_back((rank_ + i) % size_);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void all_gather(const at::Tensor& flat) override {
    on_host(flat, [&](const at::Tensor& host) {
      begin("an all_gather", host, 1);
      gather(host, even(host), -1);
    });
  }

  void reduce_scatter(const at::Tensor& flat) override {
    check_reducible(flat.scalar_type());
    on_host(flat, [&](const at::Tensor& host) {
      begin("a reduce_scatter", host, 2);
      reduce(host, even(host), ReduceOp::kSum);
    });
  }

  void all_reduce(const at::Tensor& flat, ReduceOp op) override {
    check_reducible(flat.scalar_type());
    on_host(flat, [&](const at::Tensor& host) {
      begin("an all_reduce", host, 3 + static_cast<uint32_t>(op));
      if (host.nbytes() * others_.size() <= kSmall) return reduce_whole(host, op);
      const std::vector<size_t> parts = split(host);
      reduce(host, parts, op);
      gather(host, parts, -1);
    });
  }

  void broadcast(const at::Tensor& flat, int root) override {
    on_host(flat, [&](const at::Tensor& host) {
      begin("a broadcast", host, 8 + root);
      if (size_ == 2 || host.nbytes() <= kSmall) {
        Transfers transfers;
        if (rank_ == root) {
          for (int other : others_) send(transfers, other, data(host), host.nbytes());
        } else {
          receive(transfers, root, data(host), host.nbytes());
        }
        return wait(transfers);
      }
      // The root sends each byte once, then the others pass their parts on.
      const std::vector<size_t> parts = split(host);
      Transfers transfers;
      const auto length = [&](int rank) { return parts[rank + 1] - parts[rank]; };
      if (rank_ == root) {
        for (int other : others_) send(transfers, other, data(host) + parts[other], length(other));
      } else {
        receive(transfers, root, data(host) + parts[rank_], length(rank_));
      }
      wait(transfers);
      gather(host, parts, root);
    });
  }

  std::vector<std::string> exchange(const std::string& mine) override {
    begin("an exchange", {}, 6);
    constexpr size_t kFirst = kHead - sizeof(uint64_t);
    // The first message says how long the text is, and holds its beginning.
    std::vector<std::byte> heads(kHead * size_);
    const uint64_t length = mine.size();
    std::byte* head = heads.data() + kHead * rank_;
    std::memcpy(head, &length, sizeof length);
    std::memcpy(head + sizeof length, mine.data(), std::min(kFirst, mine.size()));
    std::vector<std::string> all(size_);
    Transfers transfers;
    for (int other : others_) receive(transfers, other, heads.data() + kHead * other, kHead);
    for (int other : others_) send(transfers, other, head, kHead);
    wait(transfers);

    all[rank_] = mine;
    for (int other : others_) {
      uint64_t bytes = 0;
      std::memcpy(&bytes, heads.data() + kHead * other, sizeof bytes);
      std::string& text = all[other];
      text.resize(bytes);
      std::memcpy(text.data(), heads.data() + kHead * other + sizeof bytes, std::min<size_t>(kFirst, bytes));
      if (bytes > kFirst) receive(transfers, other, text.data() + kFirst, bytes - kFirst);
    }
    if (mine.size() > kFirst) {
      for (int other : others_) send(transfers, other, mine.data() + kFirst, mine.size() - kFirst);
    }
    wait(transfers);
    return all;
  }

  void barrier() override {
    begin("a barrier", {}, 7);
    std::vector<std::byte> bytes(size_);
    Transfers transfers;
    for (int other : others_) receive(transfers, other, &bytes[other], 1);
    for (int other : others_) send(transfers, other, &bytes[rank_], 1);
    wait(transfers);
  }

 private:
  using Transfers = std::vector<std::unique_ptr<Wires::Transfer>>;

  // The tag says which call it is: ranks that differ here never meet, and the one that waits longest says so.
  void begin(const char* call, const at::Tensor& flat, uint32_t kind) {
    const uint64_t bytes = flat.defined() ? flat.nbytes() : 0;
    const uint64_t dtype = flat.defined() ? static_cast<uint64_t>(flat.scalar_type()) : 0;
    uint64_t hash = (bytes * 64 + dtype) * 0x9e3779b97f4a7c15 + kind * 0xc2b2ae3d27d4eb4f;
    hash ^= hash >> 29;
    tag_ = static_cast<uint32_t>(hash & 0x7fffffff);
    wires_->begin(flat.defined()
                      ? fmt::format("{} of {} bytes ({})", call, bytes, at::toString(flat.scalar_type()))
                      : call);
  }

  void send(Transfers& transfers, int to, const std::byte* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kPiece) {
      transfers.push_back(wires_->send(to, tag_, from + at, std::min(kPiece, bytes - at)));
    }
  }
  void send(Transfers& transfers, int to, const char* from, size_t bytes) {
    send(transfers, to, reinterpret_cast<const std::byte*>(from), bytes);
  }
  void receive(Transfers& transfers, int from, std::byte* to, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kPiece) {
      transfers.push_back(wires_->receive(from, tag_, to + at, std::min(kPiece, bytes - at)));
    }
  }
  void receive(Transfers& transfers, int from, char* to, size_t bytes) {
    receive(transfers, from, reinterpret_cast<std::byte*>(to), bytes);
  }
  static void wait(Transfers& transfers) {
    for (const std::unique_ptr<Wires::Transfer>& one : transfers) one->wait();
    transfers.clear();
  }

  // Where each rank's part begins, in bytes, and the end.
  std::vector<size_t> even(const at::Tensor& flat) const {
    std::vector<size_t> parts(size_ + 1);
    for (int rank = 0; rank <= size_; ++rank) parts[rank] = flat.nbytes() / size_ * rank;
    return parts;
  }
  std::vector<size_t> split(const at::Tensor& flat) const {  // of any length
    const size_t part = (flat.nbytes() / size_ / kLine + 1) * kLine;
    std::vector<size_t> parts(size_ + 1);
    for (int rank = 0; rank <= size_; ++rank) parts[rank] = std::min(flat.nbytes(), part * rank);
    return parts;
  }

  // Every rank's part to all others but `has_all`.
  void gather(const at::Tensor& flat, const std::vector<size_t>& parts, int has_all) {
    Transfers transfers;
    for (int other : others_) {
      if (rank_ != has_all)
        receive(transfers, other, data(flat) + parts[other], parts[other + 1] - parts[other]);
    }
    for (int other : others_) {
      if (other != has_all)
        send(transfers, other, data(flat) + parts[rank_], parts[rank_ + 1] - parts[rank_]);
    }
    wait(transfers);
  }

  // The own part becomes that of all ranks, combined in rank order.  Chunk by chunk: the next one travels
  // while this one is added.
  void reduce(const at::Tensor& flat, const std::vector<size_t>& parts, ReduceOp op) {
    const size_t chunk = std::max(kLine, kScratch / others_.size() / kLine * kLine);
    size_t longest = 0;
    for (int rank = 0; rank < size_; ++rank) longest = std::max(longest, parts[rank + 1] - parts[rank]);
    const auto length = [&](int rank, size_t at) {
      const size_t part = parts[rank + 1] - parts[rank];
      return at < part ? std::min(chunk, part - at) : 0;
    };
    const size_t row = std::min(chunk, (longest + kLine - 1) / kLine * kLine);
    scratch_.resize(std::max(scratch_.size(), 2 * row * others_.size()));
    const auto received = [&](int turn, size_t other) {
      return scratch_.data() + (turn * others_.size() + other) * row;
    };
    Transfers transfers[2];
    const auto start = [&](size_t at, int turn) {
      for (size_t i = 0; i < others_.size(); ++i) {
        receive(transfers[turn], others_[i], received(turn, i), length(rank_, at));
      }
      for (int other : others_)
        send(transfers[turn], other, data(flat) + parts[other] + at, length(other, at));
    };
    int turn = 0;
    start(0, turn);
    for (size_t at = 0; at < longest; at += chunk, turn ^= 1) {
      if (at + chunk < longest) start(at + chunk, turn ^ 1);
      wait(transfers[turn]);
      std::byte* mine = data(flat) + parts[rank_] + at;
      combine(flat, op, mine, length(rank_, at), [&](size_t i) { return received(turn, i); });
    }
  }

  // All ranks receive everything: one round instead of two.
  void reduce_whole(const at::Tensor& flat, ReduceOp op) {
    const size_t row = flat.nbytes();
    scratch_.resize(std::max(scratch_.size(), row * size_));
    std::byte* mine = scratch_.data() + row * others_.size();  // sent, while flat is written
    std::memcpy(mine, data(flat), row);
    Transfers transfers;
    for (size_t i = 0; i < others_.size(); ++i)
      receive(transfers, others_[i], scratch_.data() + i * row, row);
    for (int other : others_) send(transfers, other, mine, row);
    wait(transfers);
    combine(flat, op, data(flat), row, [&](size_t i) { return scratch_.data() + i * row; });
  }

  template <typename Row>
  void combine(const at::Tensor& flat, ReduceOp op, std::byte* mine, size_t bytes, const Row& row) {
    rows_.resize(size_);
    rows_[rank_] = mine;
    for (size_t i = 0; i < others_.size(); ++i) rows_[others_[i]] = row(i);
    reduce_rows(flat.scalar_type(), op, mine, rows_.data(), size_,
                static_cast<int64_t>(bytes / flat.element_size()));
  }

  template <typename Work>
  static void on_host(const at::Tensor& flat, const Work& work) {
    if (flat.is_cpu()) return work(flat);
    const at::Tensor host = flat.cpu();
    work(host);
    flat.copy_(host);
  }

  std::unique_ptr<Wires> wires_;
  int rank_, size_;
  uint32_t tag_ = 0;
  std::vector<int> others_;
  std::vector<std::byte> scratch_;
  std::vector<const void*> rows_;
};

}  // namespace

std::unique_ptr<Transport> wire_transport(std::unique_ptr<Wires> wires) {
  return std::make_unique<WireTransport>(std::move(wires));
}

}  // namespace titanium
