#include "titanium/weights/patience.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "titanium/dist/agree.h"

namespace titanium {
namespace {

constexpr std::chrono::seconds kBeat(1);

// Work in a thread; what it throws is kept.
class Background {
 public:
  explicit Background(const std::function<void(const std::atomic<bool>&)>& work) : work_(work) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error&) {  // no more threads
      run();
    }
  }
  ~Background() {
    lost_ = true;
    if (thread_.joinable()) thread_.join();
  }
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  bool done_within(std::chrono::seconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return done_; });
  }
  std::exception_ptr error() const { return error_; }  // once it is done

 private:
  void run() {
    try {
      work_(lost_);
    } catch (...) {
      error_ = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  }

  const std::function<void(const std::atomic<bool>&)>& work_;
  std::atomic<bool> lost_ = false;
  std::exception_ptr error_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace

void agree_patiently(const Group& group, const std::function<void(const std::atomic<bool>&)>& work) {
  if (group.size() == 1) return work(std::atomic<bool>(false));
  Background background(work);
  std::vector<std::string> all;
  do {
    all = group.exchange(background.done_within(kBeat) ? "done" : "busy");
  } while (std::count(all.begin(), all.end(), "busy") > 0);
  agree(group, [&] {
    if (background.error()) std::rethrow_exception(background.error());
  });
}

}  // namespace titanium
