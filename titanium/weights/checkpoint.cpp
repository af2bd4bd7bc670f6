#include "titanium/weights/checkpoint.h"

#include <pthread.h>
#include <signal.h>

#include <cstdio>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>

#include "titanium/base/error.h"
#include "titanium/weights/checkpoint_load.h"
#include "titanium/weights/manifest.h"
#include "titanium/weights/save_job.h"

namespace titanium {

namespace {

// A thread that is made meanwhile takes no signals: they are for the training thread.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

// A save and the thread that writes it.
struct Checkpointer::Pending {
  Pending(ParamStore& store, Optimizer* optimizer, int64_t step, Json train, const CheckpointOptions& options)
      : job(store, optimizer, step, std::move(train), options, store.mesh().world().all("checkpoint")) {}
  ~Pending() {
    if (thread.joinable()) thread.join();
  }

  void run(const std::string& refused = "") {
    try {
      job.run(refused);
    } catch (const Error&) {
      error = std::current_exception();
    } catch (const std::exception& e) {
      error = std::make_exception_ptr(BadCheckpoint("the checkpoint could not be saved: {}", e.what()));
    }
  }

  void start() {
    const NoSignals guard;
    thread = std::thread([this] { run(); });
  }

  SaveJob job;
  std::exception_ptr error;
  std::thread thread;
};

Checkpointer::Checkpointer(ParamStore& store, Optimizer* optimizer, CheckpointOptions options)
    : store_(store), optimizer_(optimizer), options_(std::move(options)) {
  if (options_.keep_latest_k < 0) {
    throw BadConfig("[checkpoint] keep_latest_k = {}: allowed: 0 (keep all) or more", options_.keep_latest_k);
  }
  store_.set_write_hook([this](Unit& unit) {
    if (pending_) pending_->job.before_write(unit);
  });
}

Checkpointer::~Checkpointer() {
  try {
    wait();
  } catch (const RankLost&) {  // every later collective says so too
  } catch (const std::exception& e) {
    std::fprintf(stderr, "titanium: %s\n", e.what());
  }
  store_.set_write_hook(nullptr);
}

void Checkpointer::save(int64_t step, Json train) {
  if (step < 0) throw Bug("a checkpoint of step {}", step);
  settle();
  pending_ = std::make_unique<Pending>(store_, optimizer_, step, std::move(train), options_);
  if (options_.async) {
    try {
      pending_->start();
    } catch (const std::system_error& e) {
      run_now(fmt::format("no thread can be made to write it: {}", e.what()));
    }
  } else {
    run_now();
  }
}

void Checkpointer::run_now(const std::string& refused) {
  pending_->run(refused);
  const std::exception_ptr error = pending_->error;
  pending_.reset();
  if (error) std::rethrow_exception(error);
}

void Checkpointer::settle() {
  if (!pending_) return;
  if (pending_->thread.joinable()) pending_->thread.join();
  if (pending_->error) error_ = pending_->error;
  pending_.reset();
}

std::exception_ptr Checkpointer::take_error() {
  if (pending_ && pending_->job.finished()) settle();
  return std::exchange(error_, nullptr);
}

void Checkpointer::wait() {
  settle();
  if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
}

bool Checkpointer::pending() const {
  return pending_ && !pending_->job.finished();
}

LoadedCheckpoint Checkpointer::load(const std::filesystem::path& checkpoint) {
  settle();
  return load_checkpoint(checkpoint, store_, optimizer_);
}

LoadedCheckpoint Checkpointer::load_masters(const std::filesystem::path& checkpoint) {
  settle();
  return load_checkpoint(checkpoint, store_, nullptr);
}

}  // namespace titanium
