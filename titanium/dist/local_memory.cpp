#include "titanium/dist/local_memory.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <cstring>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC: the same in all processes of a host
using std::chrono::milliseconds;

constexpr uint64_t kMagic = 0x314c434f4c4e4954;  // "TINLOCL1"
constexpr int kMaxChannels = 4096;
constexpr uint64_t kFileBytes = uint64_t{1} << 40;  // pages exist once they are touched
constexpr milliseconds kSlice{20};                  // how long a waiting rank sleeps before it looks around
constexpr milliseconds kFresh{1000};                // a rank that waits has looked around since
constexpr uint64_t kPage = 4096;
const char kKey[] = "comm.train_timeout_seconds";
constexpr size_t kActionWords = 6;

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

int64_t now_ms() {
  return std::chrono::duration_cast<milliseconds>(Clock::now().time_since_epoch()).count();
}

// The word is in memory that processes share, so these are not the private kind.  Returns false after `time`.
bool futex_wait(std::atomic<uint32_t>& word, uint32_t value, milliseconds time) {
  const timespec spec{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
  const long result =
      ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &spec, nullptr, 0);
  return !(result < 0 && errno == ETIMEDOUT);
}

void futex_wake(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

struct Fd {
  int fd;
  ~Fd() {
    if (fd >= 0) ::close(fd);
  }
  int release() { return std::exchange(fd, -1); }
};

[[noreturn]] void system_error(const char* what) {
  throw Bug("shared memory between ranks: {}: {}", what, std::strerror(errno));
}

uint64_t whole_pages(uint64_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

}  // namespace

// All zero is the state before anyone came.
struct LocalMemory::Header {
  struct alignas(64) Rank {
    enum State : uint32_t { kAbsent, kHere, kLeft };
    std::atomic<uint32_t> state;
    std::atomic<int32_t> waits_for;  // the rank + 1; 0: none
    std::atomic<int64_t> beat;       // ms, when it last gave a sign: progress, or waiting for a rank
    std::atomic<uint32_t> version;   // of the two below; odd: being written
    std::atomic<int64_t> step;
    std::atomic<uint64_t> action[kActionWords];
  };
  enum State : uint32_t { kEmpty, kMaking, kReady };
  struct Failure {
    std::atomic<uint32_t> state;
    int32_t rank;
    char reason[2048];
  };
  struct Channel {
    std::atomic<uint32_t> state, maker;
    uint64_t members[kMaxLocalRanks / 64];
    char purpose[64];
    uint64_t offset;
  };

  uint64_t magic;
  int32_t ranks;
  std::atomic<uint64_t> used;  // bytes of the file
  Failure failure;
  Rank rank[kMaxLocalRanks];
  Channel channels[kMaxChannels];
};

void LocalCounter::bump() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (waiters.load(std::memory_order_seq_cst) != 0) futex_wake(value);
}

std::shared_ptr<LocalMemory> LocalMemory::create(int ranks) {
  if (ranks < 1 || ranks > kMaxLocalRanks) {
    throw BadConfig("{} ranks on one host: allowed: 1 to {}", ranks, kMaxLocalRanks);
  }
  Fd fd{::memfd_create("titanium-ranks", MFD_CLOEXEC)};
  if (fd.fd < 0) system_error("memfd_create");
  if (::ftruncate(fd.fd, static_cast<off_t>(kFileBytes)) != 0) system_error("ftruncate");
  void* map = ::mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, fd.fd, 0);
  if (map == MAP_FAILED) system_error("mmap");
  auto* header = static_cast<Header*>(map);
  header->ranks = ranks;
  header->used = whole_pages(sizeof(Header));
  header->magic = kMagic;
  return std::shared_ptr<LocalMemory>(new LocalMemory(fd.release(), header));
}

std::shared_ptr<LocalMemory> LocalMemory::open(int raw_fd) {
  Fd fd{raw_fd};
  struct stat stat = {};
  if (::fstat(fd.fd, &stat) != 0) system_error("fstat");
  if (static_cast<uint64_t>(stat.st_size) != kFileBytes)
    throw Bug("shared memory between ranks: not of this program");
  void* map = ::mmap(nullptr, sizeof(Header), PROT_READ | PROT_WRITE, MAP_SHARED, fd.fd, 0);
  if (map == MAP_FAILED) system_error("mmap");
  std::shared_ptr<LocalMemory> memory(new LocalMemory(fd.release(), map));
  if (memory->header_->magic != kMagic || memory->ranks() < 1 || memory->ranks() > kMaxLocalRanks) {
    throw Bug("shared memory between ranks: not of this program");
  }
  return memory;
}

LocalMemory::~LocalMemory() {
  for (const auto& [offset, map] : maps_) ::munmap(map.first, map.second);
  ::munmap(header_, sizeof(Header));
  ::close(fd_);
}

int LocalMemory::ranks() const {
  return header_->ranks;
}

std::byte* LocalMemory::map(uint64_t offset, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = maps_.find(offset);
  if (found != maps_.end()) return found->second.first;
  void* map = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, static_cast<off_t>(offset));
  if (map == MAP_FAILED) system_error("mmap");
  maps_[offset] = {static_cast<std::byte*>(map), bytes};
  return static_cast<std::byte*>(map);
}

LocalEnd::LocalEnd(std::shared_ptr<LocalMemory> memory, int rank, milliseconds timeout)
    : memory_(std::move(memory)), header_(memory_->header_), rank_(rank), timeout_(timeout) {
  if (rank < 0 || rank >= memory_->ranks()) throw Bug("rank {} of {}", rank, memory_->ranks());
  // A lock belongs to an open file; a descriptor that was copied or sent is the same one.
  Fd fd{::open(fmt::format("/proc/self/fd/{}", memory_->fd()).c_str(), O_RDWR | O_CLOEXEC)};
  if (fd.fd < 0) system_error("/proc/self/fd");
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (::fcntl(fd.fd, F_OFD_SETLK, &lock) != 0) {
    if (errno == EAGAIN || errno == EACCES) throw BadConfig("two processes say that they are rank {}", rank);
    system_error("F_OFD_SETLK");
  }
  lock_fd_ = fd.release();
  header_->rank[rank].beat = now_ms();
  header_->rank[rank].state = Header::Rank::kHere;
}

LocalEnd::~LocalEnd() {
  header_->rank[rank_].state = Header::Rank::kLeft;
  ::close(lock_fd_);
}

LocalChannel LocalEnd::channel(const std::vector<int>& ranks, const std::string& purpose) {
  uint64_t members[kMaxLocalRanks / 64] = {};
  for (const int rank : ranks) members[rank / 64] |= uint64_t{1} << rank % 64;
  char name[sizeof(Header::Channel::purpose)] = {};
  if (purpose.size() > sizeof name) throw Bug("a group's purpose of {} bytes: '{}'", purpose.size(), purpose);
  std::memcpy(name, purpose.data(), purpose.size());

  const uint64_t head = whole_pages(ranks.size() * sizeof(LocalMember));
  const uint64_t bytes = head + ranks.size() * 2 * kSlotBytes;
  const auto here = [&](const Header::Channel& entry) {
    std::byte* map = memory_->map(entry.offset, bytes);
    return LocalChannel{reinterpret_cast<LocalMember*>(map), map + head};
  };
  // Entries are taken in order, and nobody goes past one that is being made: there are no two of a kind.
  for (Header::Channel& entry : header_->channels) {
    uint32_t state = Header::kEmpty;
    if (entry.state.compare_exchange_strong(state, Header::kMaking)) {
      entry.maker = rank_;
      std::memcpy(entry.members, members, sizeof members);
      std::memcpy(entry.purpose, name, sizeof name);
      entry.offset = header_->used.fetch_add(bytes);
      if (entry.offset + bytes > kFileBytes) throw Bug("shared memory between ranks: too many groups");
      entry.state = Header::kReady;
      return here(entry);
    }
    const Clock::time_point end = Clock::now() + timeout_;
    while (entry.state.load() != Header::kReady) {
      check();
      if (Clock::now() > end) throw RankLost("rank {} stopped while it made a group", entry.maker.load());
      futex_wait(entry.state, Header::kMaking, milliseconds(1));
    }
    if (std::memcmp(entry.members, members, sizeof members) == 0 &&
        std::memcmp(entry.purpose, name, sizeof name) == 0) {
      return here(entry);
    }
  }
  throw Bug("more than {} groups of ranks", kMaxChannels);
}

void LocalEnd::await(LocalCounter& counter, uint32_t target, int rank, std::string_view call) {
  if (counter.reached(target)) return;
  check();
  Header::Rank& me = header_->rank[rank_];
  Clock::time_point end = Clock::now() + timeout_;
  // By rank, as this one last saw it: one that goes on, in a long stage of a pipeline say, is waited for.
  std::vector<uint32_t> progress;
  counter.waiters.fetch_add(1, std::memory_order_seq_cst);
  const auto leave = [&] {
    counter.waiters.fetch_sub(1, std::memory_order_relaxed);
    me.waits_for.store(0, std::memory_order_relaxed);
  };
  try {
    while (true) {
      const uint32_t value = counter.value.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(value - target) >= 0) break;
      if (futex_wait(counter.value, value, kSlice)) continue;
      me.waits_for.store(rank + 1, std::memory_order_relaxed);
      me.beat.store(now_ms(), std::memory_order_relaxed);
      check();
      if (gone(rank) && !counter.reached(target)) {
        const bool left = header_->rank[rank].state == Header::Rank::kLeft;
        lose(rank, left ? "left while other ranks waited for it" : "ended (crashed, or was killed)");
      }
      const int lost = culprit(rank);
      while (static_cast<int>(progress.size()) < memory_->ranks())
        progress.push_back(header_->rank[progress.size()].version);
      if (const uint32_t now = header_->rank[lost].version; now != progress[lost]) {
        progress[lost] = now;
        end = Clock::now() + timeout_;
      }
      if (Clock::now() < end) continue;
      const double seconds = static_cast<double>(timeout_.count()) / 1000;
      lose(lost, lost == rank ? fmt::format("did not come to {} within {} s ({})", call, seconds, kKey)
                              : fmt::format("kept the others waiting for {} s ({})", seconds, kKey));
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

bool LocalEnd::gone(int rank) const {
  switch (header_->rank[rank].state.load()) {
    case Header::Rank::kAbsent:
      return false;
    case Header::Rank::kLeft:
      return true;
    default:
      break;
  }
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return ::fcntl(lock_fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Whom to name: the rank that is waited for may itself wait for another, and so on.
int LocalEnd::culprit(int rank) const {
  std::vector<bool> seen(memory_->ranks());
  seen[rank_] = true;
  while (true) {
    seen[rank] = true;
    const Header::Rank& at = header_->rank[rank];
    if (now_ms() - at.beat.load() > kFresh.count()) return rank;  // stopped, or computes
    const int next = at.waits_for.load() - 1;
    if (next < 0 || seen[next]) return rank;
    rank = next;
  }
}

void LocalEnd::lose(int rank, std::string_view reason) {
  fail(rank, reason);
  check();
  throw RankLost("rank {} {}; {}", rank, reason, last_progress(rank));  // who wrote the failure died of it
}

void LocalEnd::check() const {
  const Header::Failure& failure = header_->failure;
  if (failure.state.load(std::memory_order_acquire) != Header::kReady) return;
  throw RankLost("rank {} {}; {}", failure.rank, failure.reason, last_progress(failure.rank));
}

void LocalEnd::fail(int rank, std::string_view reason) noexcept {
  Header::Failure& failure = header_->failure;
  uint32_t state = Header::kEmpty;
  if (!failure.state.compare_exchange_strong(state, Header::kMaking)) {
    // Another is writing it: what this rank throws next is that.
    for (int i = 0; i < 100 && failure.state.load() != Header::kReady; ++i) ::usleep(1000);
    return;
  }
  failure.rank = rank;
  const size_t size = std::min(reason.size(), sizeof failure.reason - 1);
  std::memcpy(failure.reason, reason.data(), size);
  failure.reason[size] = 0;
  failure.state.store(Header::kReady, std::memory_order_release);
}

void LocalEnd::progress(int64_t step, std::string_view action) {
  Header::Rank& me = header_->rank[rank_];
  uint64_t words[kActionWords] = {};
  std::memcpy(words, action.data(), std::min(action.size(), sizeof words));
  uint32_t version = me.version.load(std::memory_order_relaxed);
  if (version % 2 != 0 || !me.version.compare_exchange_strong(version, version + 1))
    return;  // another thread's
  if (step >= 0) me.step.store(step, std::memory_order_relaxed);
  for (size_t i = 0; i < std::size(words); ++i) me.action[i].store(words[i], std::memory_order_relaxed);
  me.version.store(version + 2, std::memory_order_release);
  me.beat.store(now_ms(), std::memory_order_relaxed);
}

std::string LocalEnd::last_progress(int rank) const {
  const Header::Rank& at = header_->rank[rank];
  uint64_t words[kActionWords] = {};
  int64_t step = 0;
  for (int tries = 0; tries < 1000; ++tries) {
    const uint32_t version = at.version.load(std::memory_order_acquire);
    if (version == 0) return "it had reported no step yet";
    step = at.step.load(std::memory_order_relaxed);
    for (size_t i = 0; i < std::size(words); ++i) words[i] = at.action[i].load(std::memory_order_acquire);
    if (version % 2 == 0 && at.version.load(std::memory_order_relaxed) == version) break;
  }
  const char* text = reinterpret_cast<const char*>(words);
  return fmt::format("its last progress: step {}, {}", step,
                     std::string_view(text, ::strnlen(text, sizeof words)));
}

}  // namespace titanium
