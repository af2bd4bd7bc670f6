#include "titanium/dist/group.h"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/transport.h"

namespace titanium {

class Pending::Work {
 public:
  explicit Work(std::function<void()> run) : run_(std::move(run)) {}
  void run() {
    std::exception_ptr error;
    try {
      run_();
    } catch (...) {
      error = std::current_exception();
    }
    run_ = {};
    const std::lock_guard lock(mutex_);
    error_ = error;
    done_ = true;
    changed_.notify_all();
  }
  std::exception_ptr wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    return error_;
  }

 private:
  std::function<void()> run_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
};

void Pending::wait() {
  if (!work_) return;
  const std::exception_ptr error = std::exchange(work_, nullptr)->wait();
  if (error) std::rethrow_exception(error);
}

Pending::~Pending() {
  // A rank that unwinds does not wait for the others: they may wait for it, and only what catches the error
  // can tell them.  The work keeps its tensor alive.
  if (work_ && std::uncaught_exceptions() == 0) work_->wait();
}

Pending& Pending::operator=(Pending&& other) noexcept {
  if (work_) work_->wait();
  work_ = std::exchange(other.work_, nullptr);
  return *this;
}

// The transport, and a thread that exists once something was started.  From then on everything goes through
// it, which keeps the order of calls.
struct Group::Shared {
  explicit Shared(std::shared_ptr<Transport> t) : transport(std::move(t)) {}
  ~Shared() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    changed.notify_all();
    if (thread.joinable()) thread.join();
  }

  std::shared_ptr<Pending::Work> start(std::function<void()> run) {
    auto work = std::make_shared<Pending::Work>(std::move(run));
    {
      const std::lock_guard lock(mutex);
      queue.push_back(work);
      if (!thread.joinable()) thread = std::thread([this] { serve(); });
    }
    changed.notify_all();
    return work;
  }

  void call(const std::function<void()>& run) {
    bool threaded = false;
    {
      const std::lock_guard lock(mutex);
      threaded = thread.joinable();
    }
    if (!threaded) return run();
    Pending(start(run)).wait();
  }

  void serve() {
    while (true) {
      std::shared_ptr<Pending::Work> work;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stop || !queue.empty(); });
        if (queue.empty()) return;
        work = std::move(queue.front());
        queue.pop_front();
      }
      work->run();
    }
  }

  std::shared_ptr<Transport> transport;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Pending::Work>> queue;
  std::thread thread;
  bool stop = false;
};

namespace {

// True when there is nothing to do: a group of one, or no element.
bool trivial(int size, const at::Tensor& flat) {
  if (!flat.is_contiguous()) throw Bug("a collective on a tensor that is not contiguous");
  return size == 1 || flat.numel() == 0;
}

void check_parts(const at::Tensor& flat, int size) {
  if (flat.numel() % size != 0) {
    throw Bug("a collective over {} ranks on {} elements, which they do not divide", size, flat.numel());
  }
}

}  // namespace

Group::Group(std::shared_ptr<Transport> transport)
    : shared_(std::make_shared<Shared>(std::move(transport))),
      rank_(shared_->transport->rank()),
      size_(shared_->transport->size()) {}

void Group::all_gather(const at::Tensor& flat) const {
  if (trivial(size_, flat)) return;
  check_parts(flat, size_);
  shared_->call([&] { shared_->transport->all_gather(flat); });
}

void Group::reduce_scatter(const at::Tensor& flat) const {
  if (trivial(size_, flat)) return;
  check_parts(flat, size_);
  shared_->call([&] { shared_->transport->reduce_scatter(flat); });
}

void Group::all_reduce(const at::Tensor& flat, ReduceOp op) const {
  if (trivial(size_, flat)) return;
  shared_->call([&] { shared_->transport->all_reduce(flat, op); });
}

void Group::broadcast(const at::Tensor& flat, int root) const {
  if (root < 0 || root >= size_) throw Bug("broadcast from rank {} of {}", root, size_);
  if (trivial(size_, flat)) return;
  shared_->call([&] { shared_->transport->broadcast(flat, root); });
}

void Group::barrier() const {
  if (size_ > 1) shared_->call([&] { shared_->transport->barrier(); });
}

Pending Group::start_all_gather(const at::Tensor& flat) const {
  if (trivial(size_, flat)) return {};
  check_parts(flat, size_);
  return Pending(shared_->start([transport = shared_->transport, flat] { transport->all_gather(flat); }));
}

Pending Group::start_reduce_scatter(const at::Tensor& flat) const {
  if (trivial(size_, flat)) return {};
  check_parts(flat, size_);
  return Pending(shared_->start([transport = shared_->transport, flat] { transport->reduce_scatter(flat); }));
}

Pending Group::start_broadcast(const at::Tensor& flat, int root) const {
  if (root < 0 || root >= size_) throw Bug("broadcast from rank {} of {}", root, size_);
  if (trivial(size_, flat)) return {};
  return Pending(
      shared_->start([transport = shared_->transport, flat, root] { transport->broadcast(flat, root); }));
}

std::vector<std::string> Group::exchange(const std::string& mine) const {
  if (size_ == 1) return {mine};
  std::vector<std::string> all;
  shared_->call([&] { all = shared_->transport->exchange(mine); });
  return all;
}

double Group::sum(double value) const {
  if (size_ == 1) return value;
  double sum = 0;
  const std::string mine(reinterpret_cast<const char*>(&value), sizeof value);
  for (const std::string& bytes : exchange(mine)) {
    double other = 0;
    if (bytes.size() != sizeof other) throw Bug("a sum over ranks got {} bytes of one", bytes.size());
    std::memcpy(&other, bytes.data(), sizeof other);
    sum += other;
  }
  return sum;
}

}  // namespace titanium
