#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace titanium {

// A flat tensor [n] of zeros straight from the system, page-aligned.  A page costs memory once it is written,
// so a buffer that is only planned with costs nothing.
at::Tensor zero_pages(int64_t n, at::ScalarType dtype);

// Buffers that come and go with every use of a unit: one given back serves the next unit of its size in
// bytes, so that memory is touched for the first time once.  It keeps no more than were in use at once.
class BufferPool {
 public:
  at::Tensor take(int64_t n, at::ScalarType dtype);  // [n], of any content
  void give_back(at::Tensor buffer);

 private:
  std::vector<at::Tensor> free_;
};

}  // namespace titanium
