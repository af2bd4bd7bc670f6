#include "titanium/dist/launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kForThemselves{2000};  // for ranks to end, and to say why
constexpr milliseconds kForSigterm{5000};
constexpr size_t kLongestLine = 1 << 20;  // longer ones are cut
constexpr int kReads = 64;       // of 16 KiB at a turn: all that a pipe holds, and a rank that never stops
                                 // talking is not the only one that is heard
constexpr int kCannotRun = 127;  // as a shell's

[[noreturn]] void system_error(const char* what) {
  throw Bug("starting ranks: {}: {}", what, std::strerror(errno));
}

// A port that is free now.
int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (socket < 0) system_error("socket");
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  const bool bound = ::bind(socket, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  ::close(socket);
  if (!bound) system_error("bind");
  return ntohs(address.sin_port);
}

int cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// The lines of one stream of a rank, on their way to a stream of ours.
class Lines {
 public:
  Lines(int from, int to, int rank) : from_(from), to_(to), prefix_(fmt::format("[{}] ", rank)) {}
  Lines(Lines&& other) noexcept
      : from_(std::exchange(other.from_, -1)),
        to_(other.to_),
        prefix_(std::move(other.prefix_)),
        text_(std::move(other.text_)) {}
  Lines& operator=(Lines&&) = delete;
  ~Lines() { close(); }
  int fd() const { return from_; }

  // Takes what is there, up to kReads.  False when our stream cannot be written to.
  bool pump() {
    char bytes[16384];
    bool good = true;
    for (int reads = 0; from_ >= 0 && reads < kReads; ++reads) {
      const ssize_t got = ::read(from_, bytes, sizeof bytes);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && errno == EAGAIN) return good;
      if (got <= 0) {
        close();
        return finish() && good;
      }
      text_.append(bytes, got);
      good = write_lines() && good;
    }
    return good;
  }

  // Writes what is left without its end.
  bool finish() {
    if (text_.empty()) return true;
    text_ += '\n';
    return write_lines();
  }

 private:
  void close() {
    if (from_ >= 0) ::close(std::exchange(from_, -1));
  }

  bool write_lines() {
    std::string out;
    size_t begin = 0;
    for (size_t end = 0; (end = text_.find('\n', begin)) != text_.npos; begin = end + 1) {
      out += prefix_;
      out.append(text_, begin, end + 1 - begin);
    }
    text_.erase(0, begin);
    if (text_.size() >= kLongestLine) {
      out += prefix_ + text_ + '\n';
      text_.clear();
    }
    for (std::string_view left = out; !left.empty();) {
      const ssize_t written = ::write(to_, left.data(), left.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return false;
      left.remove_prefix(written);
    }
    return true;
  }

  int from_, to_;
  std::string prefix_, text_;
};

struct Rank {
  pid_t pid = -1;
  bool running = false;
  std::optional<Clock::time_point> stopped = std::nullopt;  // since when, by SIGSTOP and the like
};

struct Ended {
  int rank, status;  // as of waitpid
  int code() const { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }
  bool lost_another() const { return code() == exit_code(ErrorKind::kRankLost); }
  std::string why() const {
    if (WIFSIGNALED(status)) {
      return fmt::format("was ended by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)));
    }
    for (const ErrorKind kind : {ErrorKind::kBadConfig, ErrorKind::kBadData, ErrorKind::kBadCheckpoint,
                                 ErrorKind::kRankLost, ErrorKind::kBug}) {
      if (code() == exit_code(kind)) return fmt::format("ended with status {} ({})", code(), name(kind));
    }
    return fmt::format("ended with status {}", code());
  }
};

class Launcher {
 public:
  explicit Launcher(int ranks) : ranks_(ranks) {
    sigset_t set;
    ::sigemptyset(&set);
    for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&set, signal);
    if (::sigprocmask(SIG_BLOCK, &set, &old_mask_) != 0) system_error("sigprocmask");
    old_pipe_ = std::signal(SIGPIPE, SIG_IGN);
    signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals_ < 0) system_error("signalfd");
  }

  ~Launcher() {
    for (const Rank& rank : ranks_) {
      if (!rank.running) continue;
      ::kill(rank.pid, SIGKILL);
      ::waitpid(rank.pid, nullptr, 0);
    }
    ::close(signals_);
    std::signal(SIGPIPE, old_pipe_);
    ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
  }

  Launcher(const Launcher&) = delete;
  Launcher& operator=(const Launcher&) = delete;

  void start(int rank, const std::vector<std::string>& command, int port) {
    int out[2] = {-1, -1}, err[2] = {-1, -1};
    if (::pipe2(out, O_CLOEXEC) != 0) system_error("pipe");
    lines_.emplace_back(out[0], STDOUT_FILENO, rank);
    if (::pipe2(err, O_CLOEXEC) != 0) {
      ::close(out[1]);
      system_error("pipe");
    }
    lines_.emplace_back(err[0], STDERR_FILENO, rank);
    for (const int fd : {out[0], err[0]}) ::fcntl(fd, F_SETFL, O_NONBLOCK);
    const pid_t launcher = ::getpid();
    const pid_t pid = ::fork();
    if (pid == 0) become(rank, command, port, launcher, out[1], err[1]);
    ::close(out[1]);
    ::close(err[1]);
    if (pid < 0) system_error("fork");
    ranks_[rank] = {.pid = pid, .running = true};
  }

  int run() {
    while (running() > 0) {
      wait_for_something();
      pass_signals_on();
      reap();
      for (Lines& lines : lines_) {
        if (!lines.pump()) unheard_ = true;
      }
      end_the_others();
    }
    // What a rank's own children still hold open is not waited for.
    for (Lines& lines : lines_) lines.pump(), lines.finish();
    const std::optional<Ended> first = cause();
    if (!first) {
      if (unheard_) throw BadData("the output of the ranks cannot be written");
      return stopped_;
    }
    fmt::print(stderr, "titanium launch: rank {} {}{}\n", first->rank, first->why(),
               ended_others_ ? "; the other ranks were ended" : "");
    return first->code();
  }

 private:
  // In the child.
  [[noreturn]] void become(int rank, const std::vector<std::string>& command, int port, pid_t launcher,
                           int out, int err) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != launcher) ::_exit(kCannotRun);  // it died before that
    ::setpgid(0, 0);                                   // a terminal's Ctrl-C comes through the launcher, once
    std::signal(SIGPIPE, old_pipe_);
    ::sigprocmask(SIG_SETMASK, &old_mask_, nullptr);
    const int in = ::open("/dev/null", O_RDONLY);
    if (::dup2(in, STDIN_FILENO) < 0 || ::dup2(out, STDOUT_FILENO) < 0 || ::dup2(err, STDERR_FILENO) < 0) {
      ::_exit(kCannotRun);
    }
    if (in > STDERR_FILENO) ::close(in);
    const auto set = [](const char* name, int value, bool anew = true) {
      ::setenv(name, std::to_string(value).c_str(), anew ? 1 : 0);
    };
    const int ranks = static_cast<int>(ranks_.size());
    set("RANK", rank);
    set("WORLD_SIZE", ranks);
    set("LOCAL_RANK", rank);
    set("LOCAL_WORLD_SIZE", ranks);
    ::setenv("MASTER_ADDR", "127.0.0.1", 1);
    ::setenv(kLauncherVariable, "1", 1);
    set("MASTER_PORT", port);
    ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");
    set("OMP_NUM_THREADS", std::max(1, cores() / ranks), false);
    std::vector<char*> argv;
    for (const std::string& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    ::execvp(argv[0], argv.data());
    fmt::print(stderr, "cannot run {}: {}\n", command[0], std::strerror(errno));
    std::fflush(stderr);
    ::_exit(kCannotRun);
  }

  int64_t running() const {
    return std::count_if(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.running; });
  }

  void wait_for_something() {
    std::vector<pollfd> polls = {{.fd = signals_, .events = POLLIN, .revents = 0}};
    for (const Lines& lines : lines_) {
      if (lines.fd() >= 0) polls.push_back({.fd = lines.fd(), .events = POLLIN, .revents = 0});
    }
    const bool waits = failures_.empty() && !unheard_ && !stopped_again();
    if (::poll(polls.data(), polls.size(), waits ? -1 : 50) < 0 && errno != EINTR) {
      system_error("poll");
    }
  }

  void pass_signals_on() {
    signalfd_siginfo info = {};
    while (::read(signals_, &info, sizeof info) == sizeof info) {
      if (info.ssi_signo == SIGCHLD) continue;
      last_passed_on_ = Clock::now();
      passed_on_.push_back(static_cast<int>(info.ssi_signo));
      end_all(passed_on_.back());
    }
  }

  void end_all(int signal) const {
    to_all(signal);
    to_all(SIGCONT);  // one that is stopped hears nothing else
  }

  void to_all(int signal) const {
    for (const Rank& rank : ranks_) {
      if (rank.running) ::kill(rank.pid, signal);
    }
  }

  void reap() {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      const std::optional<int> ended = end_of(ranks_[i]);
      if (!ended) continue;
      const int status = *ended;
      if (status == 0) continue;
      if (stopped(status)) {
        stopped_ = WEXITSTATUS(status);
        continue;
      }
      if (failures_.empty()) first_failure_ = Clock::now();
      if (!terminated_) failures_.push_back({static_cast<int>(i), status});  // else it was us
    }
  }

  // The status, once it has ended; takes note of its stops.
  static std::optional<int> end_of(Rank& rank) {
    int status = 0;
    while (rank.running && ::waitpid(rank.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == rank.pid) {
      rank.stopped.reset();
      if (WIFSTOPPED(status)) rank.stopped = Clock::now();
      if (WIFSTOPPED(status) || WIFCONTINUED(status)) continue;
      rank.running = false;
      return status;
    }
    return std::nullopt;
  }

  // Some rank is, although it was told to end and to go on.
  bool stopped_again() const {
    return !passed_on_.empty() && std::any_of(ranks_.begin(), ranks_.end(),
                                              [](const Rank& rank) { return rank.running && rank.stopped; });
  }

  // It has come to a good end on a signal that was passed on, and says so: the others do too.
  bool stopped(int status) const {
    return WIFEXITED(status) &&
           std::count(passed_on_.begin(), passed_on_.end(), WEXITSTATUS(status) - 128) > 0;
  }

  // The rank whose end was not the loss of another, or the first one.
  std::optional<Ended> cause() const {
    if (failures_.empty()) return std::nullopt;
    const auto own =
        std::find_if(failures_.begin(), failures_.end(), [](const Ended& e) { return !e.lost_another(); });
    return own == failures_.end() ? failures_.front() : *own;
  }

  void end_the_others() {
    // A rank that saves may take its time; one that is stopped does not come to its end.
    if (stopped_again()) {
      for (const Rank& rank : ranks_) {
        if (rank.running && rank.stopped &&
            Clock::now() - std::max(*rank.stopped, last_passed_on_) > kForSigterm)
          ::kill(rank.pid, SIGKILL);
      }
    }
    if ((failures_.empty() && !unheard_) || running() == 0) return;
    const Clock::time_point now = Clock::now();
    if (!terminated_) {
      if (!unheard_ && now - first_failure_ < kForThemselves) return;
      end_all(SIGTERM);
      terminated_ = now;
      ended_others_ = true;
    } else if (now - *terminated_ > kForSigterm) {
      to_all(SIGKILL);
    }
  }

  std::vector<Rank> ranks_;
  std::vector<Lines> lines_;
  std::vector<Ended> failures_;  // in the order seen
  Clock::time_point first_failure_;
  std::vector<int> passed_on_;  // signals
  Clock::time_point last_passed_on_;
  int stopped_ = 0;  // the status of ranks that ended on one of them
  std::optional<Clock::time_point> terminated_;
  bool ended_others_ = false, unheard_ = false;
  int signals_ = -1;
  sigset_t old_mask_ = {};
  void (*old_pipe_)(int) = SIG_DFL;
};

}  // namespace

int launch_ranks(int ranks, const std::vector<std::string>& command) {
  if (ranks < 1) throw BadConfig("{} ranks: allowed: an integer from 1", ranks);
  if (command.empty()) throw BadConfig("no command to run on the ranks");
  Launcher launcher(ranks);
  const int port = free_port();
  for (int rank = 0; rank < ranks; ++rank) launcher.start(rank, command, port);
  return launcher.run();
}

}  // namespace titanium
