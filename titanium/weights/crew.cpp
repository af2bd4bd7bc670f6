#include "titanium/weights/crew.h"

namespace titanium {

Crew::Crew(int helpers) {
  try {
    for (int i = 0; i < helpers; ++i) threads_.emplace_back([this] { help(); });
  } catch (...) {  // the system gives no more: those that run must not outlive us
    stop();
    throw;
  }
}

Crew::~Crew() {
  stop();
}

void Crew::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Crew::take_pieces(int64_t count, const std::function<void(int64_t)>& work) {
  for (int64_t i = next_++; i < count; i = next_++) work(i);
}

void Crew::run(int64_t count, const std::function<void(int64_t)>& work) {
  if (count < 2 || threads_.empty()) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    work_ = &work;
    count_ = count;
    next_ = 0;
    busy_ = static_cast<int>(threads_.size());
    ++list_;
  }
  changed_.notify_all();
  take_pieces(count, work);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return busy_ == 0; });
  work_ = nullptr;
}

void Crew::help() {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || list_ != seen; });
    if (stop_) return;
    seen = list_;
    const auto* work = work_;
    const int64_t count = count_;
    lock.unlock();
    take_pieces(count, *work);
    lock.lock();
    if (--busy_ == 0) changed_.notify_all();
  }
}

}  // namespace titanium
