// Keys and values of earlier tokens, for decoding.
#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace titanium {

class KvCache {
 public:
  // `slots` sequences of up to `capacity` tokens each, in every one of `layers` layers; K heads of width H.
  KvCache(int64_t layers, int64_t slots, int64_t capacity, int64_t K, int64_t H, at::ScalarType dtype);

  int64_t length(int64_t slot) const { return lengths_.at(slot); }  // tokens that all layers hold
  int64_t capacity() const { return capacity_; }

  // Keys and values of a layer, [slots * capacity, K, H], and where those of each sequence begin and end in
  // them: as AttentionSpec has it.
  struct View {
    at::Tensor k, v;
    std::vector<int64_t> bounds, starts;
  };
  // Adds the tokens [bounds[i], bounds[i + 1]) of k, v [T, K, H] behind what slots[i] holds; gives all of
  // them.  Bug beyond the capacity.
  View append(int64_t layer, const std::vector<int64_t>& slots, const std::vector<int64_t>& bounds,
              const at::Tensor& k, const at::Tensor& v);
  void advance(int64_t slot, int64_t tokens) {
    lengths_.at(slot) += tokens;
  }  // once all layers have appended
  // Slot `to` holds the first tokens of slot `from`, and nothing else.
  void copy(int64_t from, int64_t to, int64_t tokens);
  void truncate(int64_t slot, int64_t length) { lengths_.at(slot) = length; }

 private:
  int64_t capacity_;
  std::vector<int64_t> lengths_;
  std::vector<at::Tensor> k_, v_;  // [layers], each [slots * capacity, K, H]
};

}  // namespace titanium
