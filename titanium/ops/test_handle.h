// A handle over plain tensors, for tests: `tensor` is what value() gives, `sink` collects the gradient.
#pragma once
#include <ATen/ATen.h>

#include <memory>
#include <vector>

#include "titanium/base/error.h"
#include "titanium/ops/handle.h"

namespace titanium {

class TestHandle : public Handle {
 public:
  // The sink is fp64 for an fp64 tensor, otherwise fp32.
  explicit TestHandle(at::Tensor tensor, bool trainable = true)
      : tensor(std::move(tensor)), is_trainable(trainable) {
    sink = at::zeros(
        this->tensor.sizes(),
        this->tensor.options().dtype(this->tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
  }

  at::Tensor value() const override {
    if (!tensor.defined()) throw Bug("the weight is not gathered");
    return tensor;
  }
  const PackedWeight* packed() const override { return pack.get(); }
  bool trainable() const override { return is_trainable; }
  void accumulate(std::function<void(const at::Tensor& sink)> add) const override {
    if (!is_trainable) return;
    if (deferred) {
      queue.push_back(std::move(add));
    } else {
      add(sink);
    }
  }

  // Runs what a deferring handle has collected, as `backward weight` does.
  void run_queue() {
    for (auto& add : queue) add(sink);
    queue.clear();
  }

  at::Tensor tensor, sink;
  std::shared_ptr<const PackedWeight> pack;  // of `tensor`, for tests that want it
  bool is_trainable;
  bool deferred = false;
  mutable std::vector<std::function<void(const at::Tensor&)>> queue;
};

}  // namespace titanium
