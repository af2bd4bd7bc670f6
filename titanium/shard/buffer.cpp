#include "titanium/shard/buffer.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include "titanium/ops/allocator.h"

namespace titanium {

at::Tensor zero_pages(int64_t n, at::ScalarType dtype) {
  const auto options = at::TensorOptions().dtype(dtype);
  if (n == 0) return at::empty({0}, options);
  const int64_t bytes = n * static_cast<int64_t>(c10::elementSize(dtype));
  void* data = map_pages(bytes);
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
