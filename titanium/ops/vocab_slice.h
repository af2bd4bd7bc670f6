// A vocabulary that several ranks hold in parts.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

#include "titanium/ops/row_exchange.h"

namespace titanium {

// The weight that goes with it is rows [begin, begin + V) of a whole of `vocabulary` rows; the ranks' slices
// lie in rank order and may differ in length.  Ops keep its address, as they do a handle's: it outlives the
// graph.
struct VocabSlice {
  int64_t begin = 0, vocabulary = 0;
  // mine, of the same shape and dtype on every rank -> [ranks, ...], in rank order.  All ranks make the same
  // calls.
  std::function<at::Tensor(const at::Tensor& mine)> gather;
  // Where a rank has its part of the tokens alone: how the head gets the others.
  const RowExchange* rows = nullptr;
};

}  // namespace titanium
