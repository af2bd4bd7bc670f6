#include "titanium/models/kv_cache.h"

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <cstring>

#include "titanium/base/error.h"
#include "titanium/shard/buffer.h"

namespace titanium {

KvCache::KvCache(int64_t layers, int64_t slots, int64_t capacity, int64_t K, int64_t H, at::ScalarType dtype)
    : capacity_(capacity), lengths_(slots, 0) {
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (std::vector<at::Tensor>* cache : {&k_, &v_}) {
      const at::Tensor pages = zero_pages(slots * capacity * K * H, dtype);
      // Much of it may never be written: small pages take memory for what is.
      madvise(pages.data_ptr(), pages.nbytes(), MADV_NOHUGEPAGE);
      cache->push_back(pages.view({slots * capacity, K, H}));
    }
  }
}

KvCache::View KvCache::append(int64_t layer, const std::vector<int64_t>& slots,
                              const std::vector<int64_t>& bounds, const at::Tensor& k, const at::Tensor& v) {
  View view{k_.at(layer), v_.at(layer), {0}, {}};
  if (k.sizes() != v.sizes() || k.dim() != 3 || k.size(1) != view.k.size(1) || k.size(2) != view.k.size(2) ||
      k.scalar_type() != view.k.scalar_type() || v.scalar_type() != view.v.scalar_type() ||
      bounds.size() != slots.size() + 1 || bounds.back() != k.size(0))
    throw Bug("KV cache: keys or values do not fit");
  const at::Tensor keys = k.contiguous(), values = v.contiguous();
  const int64_t row = k.size(1) * k.size(2) * static_cast<int64_t>(k.element_size());
  // By hand: a decoding step makes thousands of these copies, of a few hundred bytes each.
  const auto copy = [&](const at::Tensor& from, int64_t token, const at::Tensor& to, int64_t place,
                        int64_t n) {
    std::memcpy(static_cast<char*>(to.mutable_data_ptr()) + place * row,
                static_cast<const char*>(from.const_data_ptr()) + token * row, static_cast<size_t>(n * row));
  };
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t begin = length(slots[i]), T = bounds[i + 1] - bounds[i];
    if (begin + T > capacity_) {
      throw Bug("KV cache: slot {} holds {} of {} tokens, {} more do not fit", slots[i], begin, capacity_, T);
    }
    const int64_t start = slots[i] * capacity_;
    copy(keys, bounds[i], view.k, start + begin, T);
    copy(values, bounds[i], view.v, start + begin, T);
    view.starts.push_back(start);
    view.bounds.push_back(view.bounds.back() + begin + T);
  }
  return view;
}

void KvCache::copy(int64_t from, int64_t to, int64_t tokens) {
  if (from == to || tokens > length(from))
    throw Bug("KV cache: {} tokens of slot {}, which holds {}, for slot {}", tokens, from, length(from), to);
  for (const auto* layers : {&k_, &v_}) {
    for (const at::Tensor& layer : *layers)
      layer.narrow(0, to * capacity_, tokens).copy_(layer.narrow(0, from * capacity_, tokens));
  }
  lengths_.at(to) = tokens;
}

}  // namespace titanium
