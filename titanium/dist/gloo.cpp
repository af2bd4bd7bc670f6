#include "titanium/dist/gloo.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <c10/util/Flags.h>
#include <fmt/ranges.h>
#include <pthread.h>
#include <signal.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/rank_watch.h"
#include "titanium/dist/rendezvous.h"
#include "titanium/dist/wires.h"

C10_DECLARE_int(caffe2_log_level);

namespace titanium {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;

// Of the many that libtorch's exceptions carry, the line that says what is wrong.
std::string first_line(const std::exception& e) {
  const auto* error = dynamic_cast<const c10::Error*>(&e);
  const std::string text = error != nullptr ? error->what_without_backtrace() : e.what();
  return text.substr(0, text.find('\n'));
}

// For threads that write to the store: one whose host was killed is an error to be told, and no reason for
// this process to end without a word.
void hold_sigpipe() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

// Gloo's own timeout, which closes all connections: it is the watch that says how long to wait.
constexpr std::chrono::hours kNever{24 * 20};  // an int holds its milliseconds

class StoreBoard final : public Board {
 public:
  explicit StoreBoard(Store store) : store_(std::move(store)) {}
  std::string get(const std::string& name) override {
    return store_->check({name}) ? store_->get_to_str(name) : "";
  }
  void set(const std::string& name, const std::string& text) override { store_->set(name, text); }
  std::string set_once(const std::string& name, const std::string& text) override {
    return store_->compareSet(name, "", text);
  }
  int64_t add(const std::string& name, int64_t amount) override { return store_->add(name, amount); }

 private:
  Store store_;
};

// Where the ranks meet, and by which address this one is reached.
struct Meeting {
  std::string addr;
  int port;
  bool agent;  // torchrun's agent holds the store, for all attempts of the run
  std::string attempt;
  milliseconds timeout;

  std::string where() const { return fmt::format("MASTER_ADDR={} MASTER_PORT={}", addr, port); }

  // `at`: the address of addr.
  Store open(const std::string& at, int listener, milliseconds within) const {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = listener >= 0;
    options.waitWorkers = false;
    options.timeout = within;
    if (listener >= 0) options.masterListenFd = listener;
    try {
      const Store store = c10::make_intrusive<c10d::TCPStore>(at, options);
      return c10::make_intrusive<c10d::PrefixStore>(agent ? "titanium/" + attempt : "titanium", store);
    } catch (const std::exception& e) {
      throw BadConfig("{}: what listens there is not rank 0 of this run: {}", where(), first_line(e));
    }
  }
};

std::string did_not_come(const RankWatch& watch) {
  return fmt::format("did not come within {:g} s (comm.train_timeout_seconds)",
                     watch.timeout().count() / 1e3);
}

class GlooWires final : public Wires {
 public:
  GlooWires(std::shared_ptr<RankWatch> watch, c10::intrusive_ptr<c10d::ProcessGroupGloo> group,
            std::vector<int> ranks, const std::string& name)
      : watch_(std::move(watch)),
        group_(std::move(group)),
        ranks_(std::move(ranks)),
        call_{.channel = name} {}

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }

  void begin(const std::string& what) override {
    watch_->check();
    ++call_.number;
    call_.what = fmt::format("{} over ranks {}", what, fmt::join(ranks_, " "));
  }

  std::unique_ptr<Transfer> send(int to, uint32_t tag, const void* data, size_t bytes) override {
    std::vector<at::Tensor> tensors = {bytes_of(const_cast<void*>(data), bytes)};
    return start(to, [&] { return group_->send(tensors, to, static_cast<int>(tag)); });
  }
  std::unique_ptr<Transfer> receive(int from, uint32_t tag, void* data, size_t bytes) override {
    std::vector<at::Tensor> tensors = {bytes_of(data, bytes)};
    return start(from, [&] { return group_->recv(tensors, from, static_cast<int>(tag)); });
  }

 private:
  static at::Tensor bytes_of(void* data, size_t bytes) {
    return at::from_blob(data, {static_cast<int64_t>(bytes)}, at::kByte);
  }

  class Work final : public Transfer {
   public:
    Work(const GlooWires& wires, int peer, c10::intrusive_ptr<c10d::Work> work)
        : wires_(wires), peer_(peer), work_(std::move(work)) {}
    void wait() override {
      const RankWatch::Wait waiting(*wires_.watch_, {wires_.ranks_[peer_]}, wires_.call_,
                                    [this] { work_->abort(); });
      bool done = false;
      try {
        done = work_->wait(kNever);
      } catch (const std::exception& e) {
        wires_.closed(peer_);
      }
      if (done) return;
      wires_.watch_->check();
      wires_.lost(peer_, did_not_come(*wires_.watch_));
    }

   private:
    const GlooWires& wires_;
    int peer_;
    c10::intrusive_ptr<c10d::Work> work_;
  };

  template <typename Start>
  std::unique_ptr<Transfer> start(int peer, const Start& start) {
    try {
      return std::make_unique<Work>(*this, peer, start());
    } catch (const std::exception& e) {
      closed(peer);
    }
  }

  [[noreturn]] void closed(int peer) const { lost(peer, "ended or was killed"); }
  [[noreturn]] void lost(int peer, const std::string& problem) const {
    watch_->lost({ranks_[peer]}, problem, call_.what);
  }

  std::shared_ptr<RankWatch> watch_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group_;
  std::vector<int> ranks_;
  RankWatch::Call call_;
};

using Devices = std::vector<std::shared_ptr<gloo::transport::Device>>;

Devices devices_at(const std::string& address) {
  Devices devices;
  const char* const names = std::getenv("GLOO_SOCKET_IFNAME");
  if (names == nullptr || *names == '\0') {
    return {c10d::ProcessGroupGloo::createDeviceForHostname(address)};
  }
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    try {
      devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name));
    } catch (const std::exception& e) {
      throw BadConfig("GLOO_SOCKET_IFNAME={}: no connection by '{}': {}", names, name, first_line(e));
    }
  }
  return devices;
}

// What making a group needs; shared with a thread that may hang in it.
struct Maker {
  Meeting meeting;
  std::string address, store_address;
  std::mutex mutex;
  // Connections of their own: the watch's is the watch's thread's.  One for each group that is being made,
  // because a wait in it keeps others out.
  std::vector<Store> idle;

  Store take() {
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        Store store = std::move(idle.back());
        idle.pop_back();
        return store;
      }
    }
    return meeting.open(store_address, -1, meeting.timeout);
  }
  void give_back(Store store) {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(store));
  }
};

struct Making {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false, given_up = false;
  std::exception_ptr error;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
};

class GlooWorld final : public WatchedWorld {
 public:
  GlooWorld(const Meeting& meeting, const RankWatchOptions& options)
      : rank_(options.rank), size_(options.size) {
    maker_->meeting = meeting;
    RankWatchOptions all = options;
    all.come = [maker = maker_, rank = rank_](Board& board) {
      board.set(fmt::format("address/{}", rank), maker->address);
    };
    all.met = [maker = maker_, size = size_](Board& board) {
      // Ranks at the store's own host may have found it by its loopback address: not when others come from
      // elsewhere.
      for (int rank = 0; rank < size && is_loopback(maker->address); ++rank) {
        const std::string other = board.get(fmt::format("address/{}", rank));
        if (!is_loopback(other)) maker->address = address_towards(other);
      }
    };
    watch_ = std::make_shared<RankWatch>(
        all,
        [maker = maker_, hosts = options.hosts, within = options.init_timeout]() -> std::unique_ptr<Board> {
          hold_sigpipe();
          const Meeting& meeting = maker->meeting;
          const int listener = hosts ? listen_at(meeting.port) : -1;
          const Reached reached = reach(meeting.addr, meeting.port, Clock::now() + within);
          maker->address = reached.own;
          maker->store_address = reached.other;
          return std::make_unique<StoreBoard>(meeting.open(reached.other, listener, within));
        });
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  Group group(const std::vector<int>& ranks, const std::string& purpose) override {
    const bool ascending =
        std::adjacent_find(ranks.begin(), ranks.end(), std::greater_equal<>()) == ranks.end();
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    if (!ascending || own == ranks.end() || ranks.front() < 0 || ranks.back() >= size_) {
      throw Bug("rank {} of {} asks for the group of ranks {}", rank_, size_, fmt::join(ranks, " "));
    }
    if (ranks.size() == 1) return {};
    // Two threads make theirs at once, in whatever order the other ranks do.
    std::unique_lock lock(mutex_);
    const Key key{ranks, purpose};
    made_.wait(lock, [&] { return !making_.contains(key); });
    if (const auto found = groups_.find(key); found != groups_.end()) return found->second;
    making_.insert(key);
    lock.unlock();
    const auto done = [&](const Group* group) {
      lock.lock();
      making_.erase(key);
      if (group != nullptr) groups_.emplace(key, *group);
      made_.notify_all();
    };
    try {
      const std::string name = fmt::format("group/{}/{}", fmt::join(ranks, ","), purpose);
      const Group group(wire_transport(std::make_unique<GlooWires>(
          watch_, make(ranks, static_cast<int>(own - ranks.begin()), name), ranks, name)));
      done(&group);
      return group;
    } catch (...) {
      done(nullptr);
      throw;
    }
  }

  void progress(int64_t step, std::string_view action) override { watch_->progress(step, action); }
  void fail(const std::string& reason) noexcept override { watch_->fail(reason); }
  RankWatch& watch() override { return *watch_; }

 private:
  // Connects to each of the others, which come when they come; in a thread, because nothing interrupts it.
  c10::intrusive_ptr<c10d::ProcessGroupGloo> make(const std::vector<int>& ranks, int own,
                                                  const std::string& name) {
    const auto making = std::make_shared<Making>();
    const std::string what = fmt::format("the making of the group of ranks {}", fmt::join(ranks, " "));
    std::vector<int> others = ranks;
    others.erase(others.begin() + own);
    const RankWatch::Wait waiting(*watch_, others, {.channel = name, .what = what}, [making] {
      const std::lock_guard lock(making->mutex);
      making->given_up = true;
      making->changed.notify_all();
    });
    std::thread([making, maker = maker_, own, size = static_cast<int>(ranks.size()), name] {
      hold_sigpipe();
      std::exception_ptr error;
      c10::intrusive_ptr<c10d::ProcessGroupGloo> group;
      try {
        const Store store = maker->take();
        auto options = c10d::ProcessGroupGloo::Options::create(kNever);
        options->devices = devices_at(maker->address);
        options->threads = 1;  // which do nothing: send and receive do not use them
        group = c10::make_intrusive<c10d::ProcessGroupGloo>(
            c10::make_intrusive<c10d::PrefixStore>(name, store), own, size, options);
        maker->give_back(store);
      } catch (...) {
        error = std::current_exception();
      }
      const std::lock_guard lock(making->mutex);
      making->group = std::move(group);
      making->error = error;
      making->done = true;
      making->changed.notify_all();
    }).detach();

    std::unique_lock lock(making->mutex);
    making->changed.wait(lock, [&] { return making->done || making->given_up; });
    if (making->done && making->group) return std::move(making->group);
    const std::exception_ptr error = making->error;
    lock.unlock();
    watch_->check();
    std::string problem = did_not_come(*watch_);
    try {
      if (error) std::rethrow_exception(error);
    } catch (const BadConfig&) {
      throw;
    } catch (const std::exception& e) {
      problem = fmt::format("could not be reached ({})", first_line(e));
    }
    watch_->lost(others, problem, what);
  }

  int rank_, size_;
  std::shared_ptr<Maker> maker_ = std::make_shared<Maker>();
  std::shared_ptr<RankWatch> watch_;
  using Key = std::pair<std::vector<int>, std::string>;
  std::mutex mutex_;
  std::condition_variable made_;
  std::set<Key> making_;
  std::map<Key, Group> groups_;
};

// What c10d has only the process for.  It prints a stack for each connection that closes; what matters of it
// is in our errors.  And it asks the name server for the name of each address it sees, which where that does
// not answer takes ten seconds.
void calm_c10d() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (std::getenv("TORCH_CPP_LOG_LEVEL") == nullptr) FLAGS_caffe2_log_level = 3;  // what ends the process
    setenv("RES_OPTIONS", "timeout:1 attempts:1", 0);
  });
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

std::shared_ptr<World> gloo_world(const CommConfig& comm, int rank, int size, const std::string& addr,
                                  int port) {
  if (size == 1 && rank == 0) return solo_world();
  return watched_gloo_world(comm, rank, size, addr, port);
}

std::shared_ptr<WatchedWorld> watched_gloo_world(const CommConfig& comm, int rank, int size,
                                                 const std::string& addr, int port) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw BadConfig("RANK={} WORLD_SIZE={}: allowed: 0 <= RANK < WORLD_SIZE", rank, size);
  }
  if (addr.empty()) throw BadConfig("MASTER_ADDR is empty: give the name or address of the host of rank 0");
  if (port < 1 || port > 65535) throw BadConfig("MASTER_PORT={}: allowed: 1 to 65535", port);

  calm_c10d();
  RankWatchOptions options;
  options.rank = rank;
  options.size = size;
  options.init_timeout = std::chrono::seconds(comm.init_timeout_seconds);
  options.timeout = std::chrono::seconds(comm.train_timeout_seconds);
  Meeting meeting;
  meeting.addr = addr;
  meeting.port = port;
  meeting.agent = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  meeting.attempt = variable("TORCHELASTIC_RESTART_COUNT");
  meeting.timeout = options.timeout;
  options.hosts = rank == 0 && !meeting.agent;
  options.where = meeting.where();
  options.host = meeting.agent ? "torchrun's agent" : "rank 0";
  return std::make_shared<GlooWorld>(meeting, options);
}

}  // namespace titanium
