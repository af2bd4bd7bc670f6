#include "titanium/models/kv_cache.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"

namespace titanium {

KvCache::KvCache(int64_t layers, int64_t slots, int64_t capacity, int64_t K, int64_t H, at::ScalarType dtype)
    : capacity_(capacity), lengths_(slots, 0) {
  for (int64_t layer = 0; layer < layers; ++layer) {
    k_.push_back(at::empty({slots, capacity, K, H}, at::TensorOptions().dtype(dtype)));
    v_.push_back(at::empty({slots, capacity, K, H}, at::TensorOptions().dtype(dtype)));
  }
}

std::pair<at::Tensor, at::Tensor> KvCache::append(int64_t layer, int64_t slot, const at::Tensor& k,
                                                  const at::Tensor& v) {
  const int64_t begin = length(slot), T = k.size(0);
  if (begin + T > capacity_) {
    throw Bug("KV cache: slot {} holds {} of {} tokens, {} more do not fit", slot, begin, capacity_, T);
  }
  const at::Tensor keys = k_.at(layer).select(0, slot), values = v_.at(layer).select(0, slot);
  keys.narrow(0, begin, T).copy_(k);
  values.narrow(0, begin, T).copy_(v);
  return {keys.narrow(0, 0, begin + T), values.narrow(0, 0, begin + T)};
}

}  // namespace titanium
