#include "titanium/dist/rank_watch.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "titanium/base/error.h"

namespace titanium {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr milliseconds kBeat{1000};    // between two signs of life; less for short timeouts
constexpr milliseconds kCause{1000};   // for which a lost connection waits for its cause
constexpr milliseconds kSettle{2000};  // for which a host stays after a failure, for the others to read it
constexpr milliseconds kStale{3500};   // without a sign of life: no longer answers
const char kEnd[] = "end";             // the first failure
const char kMeeting[] = "meeting";     // its outcome, which stands: kComplete or kRefused
const char kComplete[] = "complete", kRefused[] = "refused";
const char kRank0[] = "rank 0";  // RankWatchOptions::host where it is a rank

std::string of_rank(const char* what, int rank) {
  return fmt::format("{}/{}", what, rank);
}

std::string last_seen(int64_t step, std::string_view action) {
  if (step < 0 && action.empty()) return "it had not begun to work";
  return fmt::format("last at step {}, {}", std::max<int64_t>(step, 0), action);
}

// What a rank says of itself.
struct Beat {
  int64_t count = 0, progress = 0;  // beats, and calls of progress(), so far
  std::vector<int> waits_for;
  std::string last;        // last_seen()
  std::string calls = "";  // line(call) of each that it waits in

  static std::string start(const RankWatch::Call& call) {
    return fmt::format("\n{}:{}:", call.channel, call.number);
  }
  static std::string line(const RankWatch::Call& call) { return start(call) + call.what; }
  // What this rank does instead; empty where it is at that call too, or at another number.
  std::string instead_of(const RankWatch::Call& call) const {
    const size_t at = calls.find(start(call));
    if (at == calls.npos) return "";
    const size_t from = at + start(call).size();
    const std::string what = calls.substr(from, calls.find('\n', from) - from);
    return what == call.what ? "" : what;
  }

  std::string text() const {
    return fmt::format("{} {}\n{}\n{}{}", count, progress, fmt::join(waits_for, " "), last, calls);
  }
  static Beat parse(const std::string& text) {
    Beat beat;
    beat.last = "nothing is known of it";
    const size_t first = text.find('\n');
    const size_t second = first == text.npos ? text.npos : text.find('\n', first + 1);
    if (second == text.npos) return beat;
    char* after_count = nullptr;
    beat.count = std::strtoll(text.c_str(), &after_count, 10);
    beat.progress = std::strtoll(after_count, nullptr, 10);
    const char* at = text.c_str() + first + 1;
    while (at < text.c_str() + second) {
      char* end = nullptr;
      const long rank = std::strtol(at, &end, 10);
      if (end == at) break;
      beat.waits_for.push_back(static_cast<int>(rank));
      at = end;
    }
    const size_t third = std::min(text.find('\n', second + 1), text.size());
    beat.last = text.substr(second + 1, third - second - 1);
    beat.calls = text.substr(third);
    return beat;
  }
};

}  // namespace

// What the thread and the calls share.  The board belongs to the thread alone, because a call of it may hang.
struct RankWatch::Shared {
  struct Waiting {
    std::vector<int> ranks;
    Call call;
    std::function<void()> abort;
    Clock::time_point since;
  };
  struct Loss {  // to be told to the others
    int rank;
    std::string problem, what;
    Clock::time_point due;  // until then another cause may show
  };

  explicit Shared(RankWatchOptions o) : options(std::move(o)) {}

  const RankWatchOptions options;
  const milliseconds beat_pause = std::clamp(options.timeout / 4, milliseconds(100), kBeat);
  std::unique_ptr<Board> board;

  std::mutex mutex;
  std::condition_variable changed;
  bool met = false, stop = false, settled = false, ended = false;
  std::exception_ptr start_error;
  bool came = false;  // the board has answered: it is the run's
  std::optional<std::string> failure;
  int failed_rank = -1;
  std::map<uint64_t, Waiting> waiting;
  uint64_t next_id = 0;
  std::vector<Loss> losses;
  int64_t step = -1, progressed = 0;  // progressed: how often
  std::string action;
  Clock::time_point turned = Clock::now();  // when the board last answered

  // Of the thread.
  int64_t beats = 0;
  bool told_progress = false;
  std::string last_of_host = "it had not begun to work";
  Clock::time_point last_beat, compared, followed;
  Clock::time_point failed_at;
  struct Seen {
    int64_t count = -1, progress = 0;
    Clock::time_point since;  // the count is as it is
    // When the progress was last seen to change.  Of a first look nothing is known: it counts as one, unless
    // the rank's process does not answer.
    Clock::time_point went_on;
    bool changed = false;
  };
  std::map<int, Seen> seen;

  void set_failure(int rank, const std::string& message) {  // the mutex is held
    if (failure) return;
    failure = message;
    failed_rank = rank;
    failed_at = Clock::now();
    for (auto& [id, one] : waiting) one.abort();
    changed.notify_all();
  }

  std::string own_progress() {
    const std::lock_guard lock(mutex);
    return last_seen(step, action);
  }

  std::string others_progress(int rank) {
    if (rank == options.rank) return own_progress();
    const std::string left = board->get(of_rank("left", rank));
    return left.empty() ? Beat::parse(board->get(of_rank("beat", rank))).last : left;
  }

  void run(const std::function<std::unique_ptr<Board>()>& connect) {
    try {
      board = connect();
      meet();
    } catch (const Error&) {
      return end(std::current_exception());
    } catch (const std::exception& e) {
      return end(std::make_exception_ptr(RankLost(
          "{} ended or was killed while ranks met: nothing answers at {}", options.host, options.where)));
    }
    try {
      while (turn()) {
      }
    } catch (const std::exception&) {
      const std::lock_guard lock(mutex);
      if (!stop) {
        set_failure(-1, fmt::format("{} ended or was killed: nothing answers at {}{}", options.host,
                                    options.where, options.host == kRank0 ? "; " + last_of_host : ""));
      }
    }
    end(nullptr);
  }

  void end(std::exception_ptr error) {
    const std::lock_guard lock(mutex);
    start_error = std::move(error);
    settled = ended = true;
    changed.notify_all();
  }

  void meet() {
    const Clock::time_point deadline = Clock::now() + options.init_timeout;
    const std::string size = std::to_string(options.size);
    // False when all have met: then who finds fault is the stray one, and the run is none of its business.
    const auto tell_others = [&](const std::string& message) {
      if (board->set_once(kMeeting, kRefused) == kComplete) return false;
      board->set_once(kEnd, fmt::format("{} {}", options.rank, message));
      if (options.hosts) std::this_thread::sleep_for(kSettle / 4);  // while they read it
      return true;
    };
    const auto refuse = [&](const std::string& message) {
      if (!tell_others(fmt::format("rank {} failed: {}", options.rank, message))) {
        throw BadConfig("{}: {}; a run is under way there, which this process is no part of", options.where,
                        message);
      }
      throw BadConfig("{}: {}", options.where, message);
    };
    if (const std::string other = board->set_once("size", size); other != size) {
      refuse(fmt::format("rank {} is given WORLD_SIZE={}, another rank {}", options.rank, size, other));
    }
    if (board->add(of_rank("here", options.rank), 1) != 1) {
      refuse(fmt::format("two processes have RANK={}", options.rank));
    }
    if (options.come) options.come(*board);
    board->add("met", 1);
    {
      const std::lock_guard lock(mutex);
      came = true;
    }
    for (milliseconds pause(5);; pause = std::min(pause * 2, milliseconds(100))) {
      read_end();
      check();
      if (board->add("met", 0) >= options.size && board->set_once(kMeeting, kComplete) == kComplete) break;
      if (Clock::now() > deadline) {
        std::vector<int> missing;
        for (int rank = 0; rank < options.size; ++rank) {
          if (board->get(of_rank("here", rank)).empty()) missing.push_back(rank);
        }
        const std::string message = fmt::format(
            "{}: of {} ranks, {} did not come within {:g} s (comm.init_timeout_seconds)", options.where,
            options.size, fmt::join(missing, " "), options.init_timeout.count() / 1e3);
        if (!tell_others(message)) break;  // they have come now
        throw RankLost("{}", message);
      }
      std::this_thread::sleep_for(pause);
    }
    if (options.met) options.met(*board);
    beat();
    const std::lock_guard lock(mutex);
    met = true;
    changed.notify_all();
  }

  void check() {
    const std::lock_guard lock(mutex);
    if (failure) throw RankLost("{}", *failure);
  }

  // One look at everything; false when nothing is left to do.
  bool turn() {
    std::vector<Loss> due;
    bool stopping = false, failed = false;
    {
      std::unique_lock lock(mutex);
      // A busy board of many ranks is asked less often.
      const milliseconds pause(failure || !losses.empty() ? 20 : std::clamp(options.size, 100, 1000));
      if (failure && settled) changed.wait(lock, [&] { return stop; });
      const size_t known = losses.size();
      changed.wait_for(lock, pause, [&] { return !failure && (stop || losses.size() > known); });
      stopping = stop;
      failed = failure.has_value();
      due = losses;
    }
    if (!failed) {
      beat();
      failed = read_end();
    }
    if (!failed) {
      for (const Loss& loss : due) {
        const bool left = !board->get(of_rank("left", loss.rank)).empty();
        if (Clock::now() < loss.due && !left) continue;
        failed = tell(loss.rank, loss.what.empty() ? loss.problem
                                                   : fmt::format("{} while rank {} waited for it in {}",
                                                                 left ? "left the run" : loss.problem,
                                                                 options.rank, loss.what));
        break;
      }
    }
    if (!failed) failed = judge();
    {
      const std::lock_guard lock(mutex);
      turned = Clock::now();
      if (failed) losses.clear();
    }
    if (failed) return after_failure() || !stopping;
    if (!stopping) return true;
    leave();
    return false;
  }

  // Says that this rank lives, and what it does.
  void beat() {
    const Clock::time_point now = Clock::now();
    {
      const std::lock_guard lock(mutex);
      const bool first = !told_progress && step >= 0;  // soon: who is lost early is named with it too
      if (!first && beats > 0 && now - last_beat < beat_pause) return;
      told_progress = step >= 0;
    }
    last_beat = now;
    Beat beat;
    beat.count = ++beats;
    {
      const std::lock_guard lock(mutex);
      for (const auto& [id, one] : waiting) {
        if (now - one.since < beat_pause / 4) continue;
        beat.waits_for.insert(beat.waits_for.end(), one.ranks.begin(), one.ranks.end());
        beat.calls += Beat::line(one.call);
      }
      beat.last = last_seen(step, action);
      beat.progress = progressed;
    }
    board->set(of_rank("beat", options.rank), beat.text());
    if (options.hosts || options.host != kRank0) return;
    const std::string last = look_at(0).last;  // while its board answers
    const std::lock_guard lock(mutex);
    last_of_host = last;
  }

  bool read_end() {
    const std::string end = board->get(kEnd);
    if (end.empty()) return false;
    const size_t space = end.find(' ');
    const std::lock_guard lock(mutex);
    set_failure(std::atoi(end.c_str()), end.substr(space + 1));
    return true;
  }

  // Ends the run for all, unless another has.
  bool tell(int rank, const std::string& reason) {
    board->set_once(kEnd, fmt::format("{} rank {} {}; {}", rank, rank, reason, others_progress(rank)));
    return read_end();
  }

  // Whoever did not come within the timeout, and did not go on with anything either: one that computes for
  // long, in a stage of a pipeline say, is waited for.
  bool judge() {
    std::optional<Waiting> longest;
    {
      const std::lock_guard lock(mutex);
      for (const auto& [id, one] : waiting) {
        if (!longest || one.since < longest->since) longest = one;
      }
    }
    if (!longest) return false;
    const Clock::duration waited = Clock::now() - longest->since;
    if (waited > kBeat && Clock::now() - compared > kBeat) {
      compared = Clock::now();
      for (int rank : longest->ranks) {
        const std::string other = look_at(rank).instead_of(longest->call);
        if (other.empty()) continue;
        return tell(options.rank,
                    fmt::format("found a bug: it is at {}, rank {} at {}", longest->call.what, rank, other));
      }
    }
    if (waited > beat_pause && Clock::now() - followed > beat_pause) {
      followed = Clock::now();
      culprit(longest->ranks);  // from early on: what it does is seen by how it changes
    }
    const Clock::duration look =
        std::max<Clock::duration>(options.timeout - 3 * kBeat - kStale, options.timeout / 2);
    if (waited >= look && options.size <= 256) {
      for (int rank = 0; rank < options.size; ++rank) look_at(rank);
    }
    if (waited < options.timeout) return false;
    const int rank = culprit(longest->ranks);
    const Seen& one = seen[rank];
    if ((one.changed || !stale(rank)) && Clock::now() - one.went_on < options.timeout) return false;
    return tell(
        rank,
        fmt::format("did not come within {:g} s (comm.train_timeout_seconds) while rank {} waited in {}{}",
                    options.timeout.count() / 1e3, options.rank, longest->call.what,
                    stale(rank) ? ", and its process no longer answers" : ""));
  }

  Beat look_at(int rank) {
    const Beat beat = Beat::parse(board->get(of_rank("beat", rank)));
    Seen& one = seen[rank];
    const bool first = one.count < 0;
    if (beat.count != one.count) one.since = Clock::now();
    if (first || beat.progress != one.progress) one.went_on = Clock::now();
    one.changed = one.changed || (!first && beat.progress != one.progress);
    one.count = beat.count;
    one.progress = beat.progress;
    return beat;
  }
  bool stale(int rank) {
    const auto one = seen.find(rank);
    return one != seen.end() &&
           Clock::now() - one->second.since > std::min<Clock::duration>(kStale, options.timeout);
  }

  // Among the ranks that are waited for: one that has stopped, else one that does not wait itself, for which
  // the others' waits are followed.
  int culprit(const std::vector<int>& ranks) {
    std::vector<bool> visited(options.size);
    visited[options.rank] = true;
    std::vector<int> next = ranks;
    int last = ranks.front();
    while (!next.empty()) {
      std::vector<int> after;
      for (int rank : next) look_at(rank);
      for (int rank : next) {
        if (stale(rank)) return rank;
      }
      for (int rank : next) {
        if (rank < 0 || rank >= options.size || visited[rank]) continue;
        visited[rank] = true;
        last = rank;
        const Beat beat = look_at(rank);
        if (beat.waits_for.empty()) return rank;
        after.insert(after.end(), beat.waits_for.begin(), beat.waits_for.end());
      }
      next = std::move(after);
    }
    return last;
  }

  // In a thread of its own: ends what waits when the board does not answer, and the board's thread with it.
  void guard() {
    std::unique_lock lock(mutex);
    while (!failure && !ended) {
      changed.wait_for(lock, beat_pause, [&] { return failure || ended; });
      const Clock::time_point latest = Clock::now() - options.timeout - milliseconds(500);
      if (turned > latest) continue;
      for (auto& [id, one] : waiting) {
        if (one.since < latest) one.abort();
      }
    }
  }

  // Says that the failure was read; true while a host must stay for others to read it.
  bool after_failure() {
    {
      const std::lock_guard lock(mutex);
      if (settled) return false;
    }
    bool all = true;
    if (options.hosts) {
      for (int rank = 0; rank < options.size && all; ++rank) {
        if (rank != options.rank && rank != failed_rank) all = !board->get(of_rank("read", rank)).empty();
      }
    } else {
      board->set(of_rank("read", options.rank), "1");
    }
    if (!all && Clock::now() - failed_at < kSettle) return true;
    const std::lock_guard lock(mutex);
    settled = true;
    changed.notify_all();
    return false;
  }

  // This rank needs nothing more.
  void leave() {
    board->set(of_rank("left", options.rank), own_progress());
    board->add("left", 1);
    if (!options.hosts) return;
    const Clock::time_point deadline = Clock::now() + options.timeout;
    while (board->add("left", 0) < options.size && Clock::now() < deadline) {
      if (read_end()) {
        while (after_failure()) std::this_thread::sleep_for(milliseconds(20));
        return;
      }
      bool any = false;  // that is still there
      for (int rank = 0; rank < options.size && !any; ++rank) {
        if (rank == options.rank || !board->get(of_rank("left", rank)).empty()) continue;
        look_at(rank);
        any = Clock::now() - seen[rank].since < 2 * kStale;
      }
      if (!any) return;
      std::this_thread::sleep_for(milliseconds(20));
    }
  }
};

RankWatch::RankWatch(const RankWatchOptions& options, std::function<std::unique_ptr<Board>()> connect)
    : options_(options), shared_(std::make_shared<Shared>(options)) {
  std::thread([shared = shared_, connect = std::move(connect)] { shared->run(connect); }).detach();
  std::thread([shared = shared_] { shared->guard(); }).detach();
  std::unique_lock lock(shared_->mutex);
  const bool done = shared_->changed.wait_for(lock, options.init_timeout + seconds(2),
                                              [&] { return shared_->met || shared_->ended; });
  if (shared_->start_error) std::rethrow_exception(shared_->start_error);
  if (!done && shared_->came) {
    throw RankLost("{}: {} has come and no longer answers ({:g} s, comm.init_timeout_seconds)", options.where,
                   options.host, options.init_timeout.count() / 1e3);
  }
  if (!done) {
    throw BadConfig(
        "{}: who listens there did not answer within {:g} s (comm.init_timeout_seconds): it has stopped, or "
        "is another program than rank 0 of this run",
        options.where, options.init_timeout.count() / 1e3);
  }
}

RankWatch::~RankWatch() {
  std::unique_lock lock(shared_->mutex);
  shared_->stop = true;
  shared_->changed.notify_all();
  // A host ends by itself: its board answers.
  const bool answers = Clock::now() - shared_->turned < seconds(2);
  const milliseconds patience =
      options_.hosts ? options_.timeout + seconds(30) : milliseconds(answers ? 2000 : 0);
  shared_->changed.wait_for(lock, patience, [&] { return shared_->ended; });
}

RankWatch::Wait::Wait(RankWatch& watch, const std::vector<int>& ranks, const Call& call,
                      std::function<void()> abort)
    : watch_(watch) {
  Shared& shared = *watch.shared_;
  const std::lock_guard lock(shared.mutex);
  if (shared.failure) throw RankLost("{}", *shared.failure);
  id_ = shared.next_id++;
  shared.waiting.emplace(id_, Shared::Waiting{ranks, call, std::move(abort), Clock::now()});
}

RankWatch::Wait::~Wait() {
  const std::lock_guard lock(watch_.shared_->mutex);
  watch_.shared_->waiting.erase(id_);
}

void RankWatch::lost(const std::vector<int>& ranks, const std::string& problem, const std::string& what) {
  Shared& shared = *shared_;
  std::unique_lock lock(shared.mutex);
  if (!shared.failure && !shared.ended && Clock::now() - shared.turned < seconds(3)) {
    shared.losses.push_back({ranks.front(), problem, what, Clock::now() + kCause});
    shared.changed.notify_all();
    shared.changed.wait_for(lock, kCause + seconds(2), [&] { return shared.failure || shared.ended; });
  }
  // A board that does not answer was stopped, with the rank that holds it.
  if (!options_.hosts && options_.host == kRank0) {
    shared.set_failure(0, fmt::format("rank 0 stopped answering (it holds {}) while rank {} waited in {}; {}",
                                      options_.where, options_.rank, what, shared.last_of_host));
    throw RankLost("{}", *shared.failure);
  }
  // Else the verdict is this rank's own.
  shared.set_failure(
      ranks.front(),
      fmt::format("rank {} {} while rank {} waited in {}; nothing is known of it: {} does not answer",
                  fmt::join(ranks, " "), problem, options_.rank, what, options_.where));
  throw RankLost("{}", *shared.failure);
}

void RankWatch::check() const {
  shared_->check();
}

void RankWatch::progress(int64_t step, std::string_view action) {
  const std::lock_guard lock(shared_->mutex);
  if (step >= 0) shared_->step = step;
  shared_->action = action;
  ++shared_->progressed;
}

void RankWatch::fail(const std::string& reason) noexcept {
  try {
    Shared& shared = *shared_;
    std::unique_lock lock(shared.mutex);
    if (!shared.failure && !shared.ended) {
      shared.losses.push_back({options_.rank, "failed: " + reason, "", Clock::now()});
      shared.changed.notify_all();
      shared.changed.wait_for(lock, kSettle, [&] { return shared.failure || shared.ended; });
    }
    shared.set_failure(options_.rank, fmt::format("rank {} failed: {}", options_.rank, reason));
    // The process may end at once after this call.
    if (options_.hosts)
      shared.changed.wait_for(lock, kSettle, [&] { return shared.settled || shared.ended; });
  } catch (const std::exception&) {  // no memory: the others find the connection closed
  }
}

}  // namespace titanium
