// Threads that help one other thread with lists of equal pieces of work.  They sleep in between, and no two
// lists run at once.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace titanium {

class Crew {
 public:
  explicit Crew(int helpers);
  ~Crew();
  Crew(const Crew&) = delete;
  Crew& operator=(const Crew&) = delete;

  // work(0) to work(count - 1), in any order, by the helpers and the caller.  `work` must not throw.
  void run(int64_t count, const std::function<void(int64_t)>& work);

 private:
  void help();
  void stop();  // ends the helpers
  void take_pieces(int64_t count, const std::function<void(int64_t)>& work);

  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void(int64_t)>* work_ = nullptr;
  int64_t count_ = 0;
  uint64_t list_ = 0;  // counts the calls of run
  int busy_ = 0;       // helpers that have not finished the list
  bool stop_ = false;
  std::atomic<int64_t> next_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace titanium
