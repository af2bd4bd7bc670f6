// How ranks that share no memory learn that one of them is lost: each tells a board that it lives and what it
// does, and reads there who failed.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace titanium {

// Small texts under names, which all ranks see.  Every call may block for ever (its host may be stopped), and
// throws when the board is gone.
class Board {
 public:
  virtual ~Board() = default;
  virtual std::string get(const std::string& name) = 0;  // "" where nothing was set
  virtual void set(const std::string& name, const std::string& text) = 0;
  virtual std::string set_once(const std::string& name, const std::string& text) = 0;  // what it then holds
  virtual int64_t add(const std::string& name, int64_t amount) = 0;                    // the new sum
};

struct RankWatchOptions {
  int rank = 0, size = 1;
  std::chrono::milliseconds init_timeout{}, timeout{};
  bool hosts = false;  // the board is in this process: it lives until the others have read it
  std::string where;   // "MASTER_ADDR=... MASTER_PORT=..."
  std::string host;    // who ended when the board is gone: "rank 0"
  // Called in the thread: once this rank is known to be one of the run's, and once all have come.
  std::function<void(Board&)> come, met;
};

// One rank at the board, which a thread of its own reads and writes, a few times a second; a second one
// looks whether that hangs.
class RankWatch {
 public:
  // Returns when all ranks have come.  `connect` runs in the thread.  BadConfig when ranks do not fit
  // (another size, the same rank twice), or what connect throws; RankLost names those that did not come.  A
  // process that comes to a run whose ranks have all met gets the BadConfig alone: the run goes on.
  RankWatch(const RankWatchOptions& options, std::function<std::unique_ptr<Board>()> connect);
  // Tells the others that this rank needs nothing more.  The host stays until all have, for the timeout at
  // most.
  ~RankWatch();
  RankWatch(const RankWatch&) = delete;
  RankWatch& operator=(const RankWatch&) = delete;

  // What is waited for: call `number` on a channel, of which all its ranks must make the same.
  struct Call {
    std::string channel = "";
    int64_t number = 0;
    std::string what = "";  // "a barrier over ranks 0 1"
  };

  // This rank waits for others.  When the run fails, or they neither come nor go on with anything within the
  // timeout, or are at another call of the same number, or the board does not answer for that long, `abort`
  // is called, from another thread, maybe more than once.  RankLost when the run has failed.
  class Wait {
   public:
    Wait(RankWatch& watch, const std::vector<int>& ranks, const Call& call, std::function<void()> abort);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    RankWatch& watch_;
    uint64_t id_;
  };

  // A wait for these ranks came back without them.  Ends the run for all; RankLost, with the first cause: for
  // a short time another one may still show, then it is `problem`, as in "ended or was killed".
  [[noreturn]] void lost(const std::vector<int>& ranks, const std::string& problem, const std::string& what);
  void check() const;  // RankLost when the run has failed
  std::chrono::milliseconds timeout() const { return options_.timeout; }

  void progress(int64_t step, std::string_view action);
  void fail(const std::string& reason) noexcept;

 private:
  struct Shared;
  RankWatchOptions options_;
  std::shared_ptr<Shared> shared_;  // the thread may outlive this object when the board does not answer
};

}  // namespace titanium
