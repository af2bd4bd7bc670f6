#include "titanium/shard/buffer.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include "titanium/ops/allocator.h"

namespace titanium {

at::Tensor zero_pages(int64_t n, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  if (n == 0) return at::empty({0}, options);
  const size_t bytes = static_cast<size_t>(n) * c10::elementSize(dtype);
  const auto map = [bytes] {
    return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  };
  void* data = map();
  if (data == MAP_FAILED) {
    release_free_blocks();
    data = map();
  }
  TORCH_CHECK(data != MAP_FAILED, "can't allocate memory: ", bytes, " bytes were refused");  // as ATen's
  madvise(data, bytes, MADV_HUGEPAGE);  // fewer faults at the first touch; a hint only
  return at::from_blob(
      data, {n}, [bytes](void* p) { munmap(p, bytes); }, options);
}

at::Tensor BufferPool::take(int64_t n, at::ScalarType dtype) {
  for (at::Tensor& buffer : free_) {
    if (buffer.nbytes() != static_cast<size_t>(n) * c10::elementSize(dtype)) continue;
    at::Tensor taken = std::move(buffer);
    std::swap(buffer, free_.back());
    free_.pop_back();
    return taken.view(dtype);
  }
  return zero_pages(n, dtype);
}

void BufferPool::give_back(at::Tensor buffer) {
  free_.push_back(std::move(buffer));
}

}  // namespace titanium
