// The memory that ranks of one host share, and how one of them waits for another in it.  Threads of one
// process share the mapping, processes map the same memory file; everything else is the same for both.
#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace titanium {

constexpr int kMaxLocalRanks = 256;
constexpr int64_t kSlotBytes = 256 << 10;  // of one rank and round: the slots of a group fit the cache

// A count that goes up, modulo 2^32, and that other ranks wait for.
struct LocalCounter {
  std::atomic<uint32_t> value, waiters;
  bool reached(uint32_t target) const {
    return static_cast<int32_t>(value.load(std::memory_order_acquire) - target) >= 0;
  }
  void bump();  // and wakes who waits
};

// One rank's part of a channel.  Everything that ranks of a group do together is a row of rounds: in round k
// each posts up to kSlotBytes in slot k % 2, reads what it wants of the others, and says so.  A slot is
// written again when all have read it.
struct LocalMember {
  alignas(64) LocalCounter posted;  // rounds
  alignas(64) LocalCounter read;    // rounds
  struct alignas(64) What {         // what a round belongs to: ranks that differ here would read nonsense
    uint64_t bytes;
    uint32_t call, dtype;
    bool operator==(const What&) const = default;
  } what[2];
};

struct LocalChannel {
  LocalMember* members;  // [ranks in the group]
  std::byte* slots;      // [ranks in the group, 2, kSlotBytes]
  std::byte* slot(int member, uint32_t round) const { return slots + (2 * member + round % 2) * kSlotBytes; }
};

class LocalMemory {
 public:
  static std::shared_ptr<LocalMemory> create(int ranks);
  // What another process created; `fd` is consumed.  Bug when it is something else.
  static std::shared_ptr<LocalMemory> open(int fd);
  ~LocalMemory();
  int fd() const { return fd_; }
  int ranks() const;

 private:
  friend class LocalEnd;
  struct Header;
  LocalMemory(int fd, void* header) : fd_(fd), header_(static_cast<Header*>(header)) {}
  std::byte* map(uint64_t offset, uint64_t bytes);  // once for each offset

  int fd_;
  Header* header_;
  std::mutex mutex_;
  std::map<uint64_t, std::pair<std::byte*, uint64_t>> maps_;
};

// One rank at it.  Its life is a lock on a byte of the file, which the kernel drops when the process dies.
class LocalEnd {
 public:
  LocalEnd(std::shared_ptr<LocalMemory> memory, int rank, std::chrono::milliseconds timeout);
  ~LocalEnd();
  int rank() const { return rank_; }

  // The channel of these ranks and purpose; whoever comes first makes it.
  LocalChannel channel(const std::vector<int>& ranks, const std::string& purpose);

  // Returns when the counter of `rank` has reached the target.  RankLost when any rank failed, when that one
  // ended, or after the timeout; then for all ranks.  `call` names what is waited for.
  void await(LocalCounter& counter, uint32_t target, int rank, std::string_view call);
  // RankLost when any rank failed.
  void check() const;

  void progress(int64_t step, std::string_view action);
  // The first one counts.
  void fail(int rank, std::string_view reason) noexcept;

 private:
  using Header = LocalMemory::Header;
  [[noreturn]] void lose(int rank, std::string_view reason);  // fails the run, and throws RankLost
  bool gone(int rank) const;
  int culprit(int rank) const;
  std::string last_progress(int rank) const;

  std::shared_ptr<LocalMemory> memory_;
  Header* header_;
  int rank_;
  int lock_fd_ = -1;  // an open file of its own, for the lock
  std::chrono::milliseconds timeout_;
};

}  // namespace titanium
