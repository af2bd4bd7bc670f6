#pragma once
#include <ATen/core/Tensor.h>

namespace titanium {

// A flat tensor [n] of zeros straight from the system, page-aligned.  A page costs memory once it is written,
// so a buffer that is only planned with costs nothing.
at::Tensor zero_pages(int64_t n, at::ScalarType dtype);

}  // namespace titanium
