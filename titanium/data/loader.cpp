#include "titanium/data/loader.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// A signal handler can only set a flag, so that somebody has to look at it.
constexpr std::chrono::milliseconds kLookForStop{100};

auto maker_of(const Dataset& data, const Sampler& sampler) {
  return [&data, sampler](int64_t position, const std::stop_token& stop) -> std::optional<Step> {
    auto drawn = sampler.at(position);
    if (!drawn) return std::nullopt;
    Step step;
    step.begin = drawn->begin;
    step.end = drawn->end;
    step.records = std::move(drawn->records);
    step.samples.reserve(step.records.size());
    for (int64_t record : step.records) {
      if (stop.stop_requested()) return std::nullopt;
      step.samples.push_back(data.sample(record));
      step.samples.back().index = static_cast<int64_t>(step.samples.size()) - 1;
    }
    return step;
  };
}

}  // namespace

struct Loader::Shared {
  // What the source gave for one step: the step, its end of data (both empty), or its exception.
  struct Made {
    std::optional<Step> step;
    std::exception_ptr error;
  };

  std::mutex mutex;
  std::condition_variable_any changed;
  std::deque<Made> made;  // in order of steps; nothing follows an end or an error
  std::jthread worker;    // last, so that it ends before what it uses

  void run(const std::stop_token& stop, const Maker& make, int64_t position, size_t ahead) {
    while (true) {
      {
        std::unique_lock lock(mutex);
        if (!changed.wait(lock, stop, [&] { return made.size() < ahead; })) return;
      }
      Made next;
      try {
        next.step = make(position, stop);
        if (next.step && (next.step->begin != position || next.step->end <= position)) {
          throw Bug("the step at position {} says it is [{}, {})", position, next.step->begin,
                    next.step->end);
        }
      } catch (...) {
        next = {std::nullopt, std::current_exception()};
      }
      const bool last = !next.step;
      if (!last) position = next.step->end;
      {
        const std::lock_guard lock(mutex);
        made.push_back(std::move(next));
      }
      changed.notify_all();
      if (last) return;
    }
  }
};

Loader::Loader(const Dataset& data, const Sampler& sampler, int64_t position, int ahead)
    : shared_(start(maker_of(data, sampler), position, ahead)), position_(position) {}

Loader::Loader(Source source, int64_t position, int ahead)
    : shared_(start([source = std::move(source)](int64_t at, const std::stop_token&) { return source(at); },
                    position, ahead)),
      position_(position) {}

std::unique_ptr<Loader::Shared> Loader::start(Maker maker, int64_t position, int ahead) {
  auto shared = std::make_unique<Shared>();
  shared->worker =
      std::jthread([shared = shared.get(), maker = std::move(maker), position,
                    ahead = static_cast<size_t>(std::max(1, ahead))](const std::stop_token& stop) {
        shared->run(stop, maker, position, ahead);
      });
  return shared;
}

Loader::~Loader() = default;

std::optional<Step> Loader::next(const std::atomic<bool>* stop) {
  std::unique_lock lock(shared_->mutex);
  while (!shared_->changed.wait_for(lock, kLookForStop, [&] { return !shared_->made.empty(); })) {
    if (stop != nullptr && *stop) return std::nullopt;
  }
  Shared::Made& front = shared_->made.front();
  if (front.error) std::rethrow_exception(front.error);
  if (!front.step) return std::nullopt;
  std::optional<Step> step = std::move(front.step);
  shared_->made.pop_front();
  position_ = step->end;
  lock.unlock();
  shared_->changed.notify_all();
  return step;
}

}  // namespace titanium
