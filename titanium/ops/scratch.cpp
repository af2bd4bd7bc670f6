#include "titanium/ops/scratch.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

namespace titanium {
namespace {

struct Buffer {
  void* data;
  int64_t bytes;
};

Buffer map(int64_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw std::bad_alloc();
  madvise(data, bytes, MADV_HUGEPAGE);  // fewer faults at the first touch; a hint only
  return {data, bytes};
}

class ScratchPool {
 public:
  Buffer take(int64_t bytes) {
    {
      const std::lock_guard lock(mutex_);
      auto best = free_.end(), largest = free_.end();
      for (auto buffer = free_.begin(); buffer != free_.end(); ++buffer) {
        if (largest == free_.end() || buffer->bytes > largest->bytes) largest = buffer;
        if (buffer->bytes >= bytes && (best == free_.end() || buffer->bytes < best->bytes)) best = buffer;
      }
      if (best != free_.end()) return remove(best);
      // The new one takes the place of one that was too small.
      if (bytes <= kKeptScratch && largest != free_.end()) {
        const Buffer small = remove(largest);
        munmap(small.data, small.bytes);
      }
    }
    return map(bytes);
  }
  void give_back(Buffer buffer) {
    if (buffer.bytes > kKeptScratch) {
      munmap(buffer.data, buffer.bytes);
      return;
    }
    const std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }
  int64_t idle_bytes() {
    const std::lock_guard lock(mutex_);
    int64_t sum = 0;
    for (const Buffer& buffer : free_) sum += buffer.bytes;
    return sum;
  }

 private:
  Buffer remove(std::vector<Buffer>::iterator place) {
    const Buffer buffer = *place;
    *place = free_.back();
    free_.pop_back();
    return buffer;
  }

  std::mutex mutex_;
  std::vector<Buffer> free_;
};

ScratchPool& pool() {
  static auto* const pool = new ScratchPool;  // outlives every tensor
  return *pool;
}

}  // namespace

at::Tensor scratch(int64_t n, at::ScalarType dtype) {
  const int64_t bytes = n * static_cast<int64_t>(c10::elementSize(dtype));
  if (bytes < kLeastScratch) return at::empty({n}, at::dtype(dtype));
  const Buffer buffer = pool().take(bytes);
  return at::from_blob(
      buffer.data, {n}, [buffer](void*) { pool().give_back(buffer); }, at::dtype(dtype));
}

int64_t idle_scratch_bytes() {
  return pool().idle_bytes();
}

}  // namespace titanium
