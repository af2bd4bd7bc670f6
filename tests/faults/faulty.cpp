// The titanium command with a rank that comes to grief where TITANIUM_FAULT says: "RANK HOW STEP WHERE".  The
// linker puts these functions in front of the product's (--wrap), which knows nothing of them.
//   HOW     throw, exit, kill, stop (as SIGSTOP); full: no more room on the disk of checkpoints from STEP on,
//   while the file WHERE exists WHERE   "main": before anything; "write": in the thread that writes a
//   checkpoint; else a part of the action's name
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

#include "titanium/base/error.h"

namespace titanium {

class LocalEnd;
class RankWatch;

namespace {

struct Fault {
  std::string how, where;
  int64_t step = -1;
};

// Empty where this process is another rank.
const Fault& fault() {
  static const Fault known = [] {
    Fault fault;
    const char *text = std::getenv("TITANIUM_FAULT"), *rank = std::getenv("RANK");
    std::istringstream words(text == nullptr ? "" : text);
    std::string who;
    words >> who >> fault.how >> fault.step >> std::ws;
    std::getline(words, fault.where);
    return rank != nullptr && who == rank ? fault : Fault{};
  }();
  return known;
}

std::atomic<int64_t> now = -1;  // step

void come_to_grief() {
  static std::atomic<bool> was = false;
  if (was.exchange(true)) return;
  const std::string& how = fault().how;
  if (how == "throw") throw BadData("it threw");
  if (how == "exit") ::_exit(7);
  if (how == "kill") ::raise(SIGKILL);
  if (how == "stop") ::raise(SIGSTOP);
}

[[gnu::constructor]] void before_main() {
  if (fault().where == "main") come_to_grief();
}

void is_at(int64_t step, std::string_view action) {
  if (step >= 0) now = step;
  if (!fault().how.empty() && now == fault().step && action.find(fault().where) != action.npos)
    come_to_grief();
}

bool is_checkpoint(int fd) {
  std::error_code error;
  const std::string path =
      std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error).string();
  return path.find("/checkpoint/") != path.npos;
}

}  // namespace

// Of both transports.
void local_progress(LocalEnd*, int64_t, std::string_view) asm(
    "__real__ZN8titanium8LocalEnd8progressElSt17basic_string_viewIcSt11char_traitsIcEE");
void progress(LocalEnd* self, int64_t step, std::string_view action) asm(
    "__wrap__ZN8titanium8LocalEnd8progressElSt17basic_string_viewIcSt11char_traitsIcEE");
void gloo_progress(RankWatch*, int64_t, std::string_view) asm(
    "__real__ZN8titanium9RankWatch8progressElSt17basic_string_viewIcSt11char_traitsIcEE");
void progress(RankWatch* self, int64_t step, std::string_view action) asm(
    "__wrap__ZN8titanium9RankWatch8progressElSt17basic_string_viewIcSt11char_traitsIcEE");

void progress(LocalEnd* self, int64_t step, std::string_view action) {
  local_progress(self, step, action);
  is_at(step, action);
}

void progress(RankWatch* self, int64_t step, std::string_view action) {
  gloo_progress(self, step, action);
  is_at(step, action);
}

}  // namespace titanium

extern "C" {
ssize_t __real_write(int fd, const void* bytes, size_t size);
ssize_t __wrap_write(int fd, const void* bytes, size_t size);

ssize_t __wrap_write(int fd, const void* bytes, size_t size) {
  using namespace titanium;
  const bool full = fault().how == "full" && now >= fault().step;
  if (full && is_checkpoint(fd) && std::filesystem::exists(fault().where)) {
    errno = ENOSPC;
    return -1;
  }
  if (fault().where == "write" && now >= fault().step && is_checkpoint(fd)) come_to_grief();
  return __real_write(fd, bytes, size);
}
}
