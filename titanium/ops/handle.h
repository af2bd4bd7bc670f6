// A weight as an op sees it.  An op never keeps the tensor: it asks for it in forward and again in backward,
// because the buffer behind it may have been freed and refilled in between (design D2).
#pragma once
#include <ATen/core/Tensor.h>

#include <functional>

namespace titanium {

class PackedWeight;  // products.h

class Handle {
 public:
  virtual ~Handle() = default;

  // The weight as it is now, in the compute dtype.  Valid until the next `reshard` of its unit: use it, drop
  // it. Bug when the unit is not gathered.
  virtual at::Tensor value() const = 0;

  // The same, packed for products with it from the left; null where its owner keeps no such copy.  Valid as
  // long.
  virtual const PackedWeight* packed() const { return nullptr; }

  // False when frozen: an op then skips the weight gradient altogether.
  virtual bool trainable() const = 0;

  // Adds a gradient: calls `add` with the sink, a zeroed-or-accumulated tensor of the weight's shape in the
  // reduce dtype (fp32, or fp64 in an fp64 run), at once or, under a schedule that splits input and weight
  // gradients, when the action `backward weight` runs; so `add` owns what it captures.  `add` must add, never
  // assign.  Does nothing when frozen.
  virtual void accumulate(std::function<void(const at::Tensor& sink)> add) const = 0;
};

}  // namespace titanium
