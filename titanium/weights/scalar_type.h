// Torch's dtypes and the files'.
#pragma once
#include <ATen/core/Tensor.h>

#include "titanium/base/error.h"
#include "titanium/formats/dtype.h"

namespace titanium {

inline Dtype to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return Dtype::F32;
    case at::kBFloat16:
      return Dtype::BF16;
    case at::kDouble:
      return Dtype::F64;
    case at::kHalf:
      return Dtype::F16;
    default:
      throw Bug("weights are not kept in {}", c10::toString(type));
  }
}

// BadConfig for a dtype that weights cannot have.
inline at::ScalarType to_scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::F32:
      return at::kFloat;
    case Dtype::BF16:
      return at::kBFloat16;
    case Dtype::F64:
      return at::kDouble;
    case Dtype::F16:
      return at::kHalf;
    default:
      throw BadConfig("dtype {}: allowed for weights: float32, bfloat16, float64, float16",
                      torch_name(dtype));
  }
}

}  // namespace titanium
