// Rows of activations that several ranks hold in parts.
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

namespace titanium {

// T tokens cut over n ranks, in rank order.  Ops keep its address, as they do a handle's: it outlives the
// graph. All ranks make the same calls.
struct RowExchange {
  // The rows of every rank: [T/n, D] -> [T, D].
  std::function<at::Tensor(const at::Tensor& mine)> gather;
  // This rank's rows of the sum over ranks: [T, D] -> [T/n, D].  Overwrites `partial`, which is contiguous.
  std::function<at::Tensor(const at::Tensor& partial)> scatter;
};

}  // namespace titanium
