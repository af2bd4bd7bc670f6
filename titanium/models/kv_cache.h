// Keys and values of earlier tokens, for decoding.
#pragma once
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace titanium {

class KvCache {
 public:
  // `slots` sequences of up to `capacity` tokens each, in every one of `layers` layers; K heads of width H.
  KvCache(int64_t layers, int64_t slots, int64_t capacity, int64_t K, int64_t H, at::ScalarType dtype);

  int64_t length(int64_t slot) const { return lengths_.at(slot); }  // tokens that all layers hold
  int64_t capacity() const { return capacity_; }

  // Adds k, v [T, K, H] behind what the slot holds; gives all of them, [length + T, K, H].  Bug beyond the
  // capacity.
  std::pair<at::Tensor, at::Tensor> append(int64_t layer, int64_t slot, const at::Tensor& k,
                                           const at::Tensor& v);
  void advance(int64_t slot, int64_t tokens) {
    lengths_.at(slot) += tokens;
  }  // once all layers have appended
  void truncate(int64_t slot, int64_t length) { lengths_.at(slot) = length; }

 private:
  int64_t capacity_;
  std::vector<int64_t> lengths_;
  std::vector<at::Tensor> k_, v_;  // [layers], each [slots, capacity, K, H]
};

}  // namespace titanium
