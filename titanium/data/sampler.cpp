#include "titanium/data/sampler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "titanium/base/error.h"
#include "titanium/base/random.h"

namespace titanium {
namespace {

constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

}  // namespace

LastBatch last_batch_from(std::string_view name) {
  if (name == "drop") return LastBatch::kDrop;
  if (name == "keep") return LastBatch::kKeep;
  if (name == "fail") return LastBatch::kFail;
  throw BadConfig("'{}' does not say what becomes of the last batch; allowed: drop, keep, fail", name);
}

Sampler::Sampler(std::vector<int64_t> records, const SamplerOptions& options,
                 std::function<int64_t(int64_t)> length)
    : records_(std::make_shared<const std::vector<int64_t>>(std::move(records))),
      options_(options),
      length_(std::move(length)),
      cache_(std::make_shared<Cache>()) {
  const SamplerOptions& o = options_;
  if (records_->empty()) throw BadData("there are no records to draw from");
  if (o.global_batch_size < 0 || o.global_batch_tokens < 0 ||
      (o.global_batch_size > 0) == (o.global_batch_tokens > 0)) {
    throw BadConfig("exactly one of global_batch_size = {} and global_batch_tokens = {} must be > 0",
                    o.global_batch_size, o.global_batch_tokens);
  }
  if (o.epochs < 0 || o.epochs > kEndless / size()) {
    throw BadConfig("data.epochs = {} of {} records is out of range", o.epochs, size());
  }
  if (o.global_batch_tokens > 0) {
    if (!length_) throw Bug("global_batch_tokens needs the lengths of the records");
    for (int64_t record : *records_) {
      if (length_(record) > o.global_batch_tokens) {
        throw BadData("record {} has {} tokens, more than global_batch_tokens = {}", record, length_(record),
                      o.global_batch_tokens);
      }
    }
  }
  if (o.epochs > 0) {
    if (o.last_batch == LastBatch::kFail && left_out(o.epochs) > 0) {
      throw BadConfig("data.last_batch = fail: {} of {} samples do not fill a batch", left_out(o.epochs),
                      o.epochs * size());
    }
    if (steps_for(o.epochs) == 0) {
      throw BadConfig(
          "{} samples ({} records, {} epochs) do not fill one batch; data.last_batch = keep takes them",
          o.epochs * size(), size(), o.epochs);
    }
  }
}

// Records by position.  Keeps the permutation of the epoch it is in.
class Sampler::Stream {
 public:
  explicit Stream(const Sampler& sampler) : sampler_(sampler) {}
  int64_t operator[](int64_t position) {
    const int64_t epoch = position / sampler_.size(), place = position % sampler_.size();
    if (!sampler_.options_.shuffle) return (*sampler_.records_)[static_cast<size_t>(place)];
    if (epoch != epoch_) {
      order_ = sampler_.order(epoch);
      epoch_ = epoch;
    }
    return (*sampler_.records_)[static_cast<size_t>((*order_)[static_cast<size_t>(place)])];
  }

 private:
  const Sampler& sampler_;
  int64_t epoch_ = -1;
  Order order_;
};

Sampler::Order Sampler::order(int64_t epoch) const {
  const std::lock_guard lock(cache_->mutex);
  auto& orders = cache_->orders;
  for (const auto& [number, order] : orders) {
    if (number == epoch) return order;
  }
  auto made = std::make_shared<const std::vector<int64_t>>(
      permutation(Random(options_.seed, Purpose::kShuffle, static_cast<uint64_t>(epoch)), size()));
  if (orders.size() == 2) orders.erase(orders.begin());  // a batch may lie across the end of an epoch
  orders.emplace_back(epoch, made);
  return made;
}

int64_t Sampler::step_end(int64_t position, int64_t samples) const {
  int64_t end = position;
  bool full = false;
  if (options_.global_batch_size > 0) {
    full = options_.global_batch_size <= samples - position;
    end = full ? position + options_.global_batch_size : samples;
  } else {
    int64_t room = options_.global_batch_tokens;
    Stream stream(*this);
    for (; end < samples && !full; ++end) {
      room -= length_(stream[end]);
      full = room <= 0;
      if (room < 0) break;
    }
  }
  if (full) return end;
  if (end == position || options_.last_batch == LastBatch::kDrop) return -1;
  if (options_.last_batch == LastBatch::kKeep) return end;
  throw BadConfig("data.last_batch = fail: the last {} samples do not fill a batch", end - position);
}

std::optional<StepRecords> Sampler::at(int64_t position) const {
  const int64_t samples = options_.epochs > 0 ? options_.epochs * size() : kEndless;
  if (position < 0 || position > samples) {
    throw BadData("position {} is not within the {} samples of {} epochs of {} records", position, samples,
                  options_.epochs, size());
  }
  StepRecords step;
  step.begin = position;
  step.end = step_end(position, samples);
  if (step.end < 0) return std::nullopt;
  step.records.reserve(static_cast<size_t>(step.end - step.begin));
  Stream stream(*this);
  for (int64_t p = step.begin; p < step.end; ++p) step.records.push_back(stream[p]);
  return step;
}

std::optional<StepRecords> Sampler::step(int64_t s) const {
  if (s < 0) throw Bug("step {} does not exist", s);
  const int64_t samples = options_.epochs > 0 ? options_.epochs * size() : kEndless;
  int64_t position = 0;
  if (options_.global_batch_size > 0) {
    if (s > samples / options_.global_batch_size) return std::nullopt;
    position = s * options_.global_batch_size;
  } else {
    for (int64_t i = 0; i < s; ++i) {
      position = step_end(position, samples);
      if (position < 0) return std::nullopt;
    }
  }
  return at(position);
}

std::pair<int64_t, int64_t> Sampler::steps_and_rest(int64_t epochs) const {
  if (epochs < 0 || epochs > kEndless / size()) {
    throw BadConfig("data.epochs = {} of {} records is out of range", epochs, size());
  }
  const int64_t samples = epochs * size();
  const bool keep = options_.last_batch == LastBatch::kKeep;
  if (const int64_t batch = options_.global_batch_size; batch > 0) {
    const int64_t rest = samples % batch;
    return {samples / batch + (keep && rest > 0), keep ? 0 : rest};
  }
  int64_t steps = 0, position = 0;
  while (true) {
    const int64_t end = step_end(position, samples);
    if (end < 0) return {steps, samples - position};
    ++steps;
    position = end;
  }
}

int64_t Sampler::steps_for(int64_t epochs) const {
  return steps_and_rest(epochs).first;
}
int64_t Sampler::left_out(int64_t epochs) const {
  return steps_and_rest(epochs).second;
}

}  // namespace titanium
