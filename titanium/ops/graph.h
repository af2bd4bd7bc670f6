// What the autograd Functions of this room share: how a node keeps a handle, and when there is a node at all.
#pragma once
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "titanium/base/error.h"
#include "titanium/ops/handle.h"

namespace titanium {

// An input of a Function that may be undefined travels as an optional: libtorch takes no undefined Variable.
using MaybeTensor = std::optional<at::Tensor>;
inline MaybeTensor maybe(const at::Tensor& tensor) {
  return tensor.defined() ? MaybeTensor(tensor) : std::nullopt;
}
inline at::Tensor or_none(const MaybeTensor& tensor) {
  return tensor ? *tensor : at::Tensor();
}

// False under NoGrad or when nothing here wants a gradient: the op then runs without a node and keeps
// nothing.
inline bool records(std::initializer_list<at::Tensor> inputs) {
  if (!at::GradMode::is_enabled()) return false;
  for (const at::Tensor& input : inputs)
    if (input.defined() && input.requires_grad()) return true;
  return false;
}

// What a node is given and does not own.  Null stays null.
inline void keep_address(torch::autograd::AutogradContext* ctx, const char* key, const void* object) {
  ctx->saved_data[key] = static_cast<int64_t>(reinterpret_cast<intptr_t>(object));
}
template <typename T>
const T* kept_address(torch::autograd::AutogradContext* ctx, const char* key) {
  return reinterpret_cast<const T*>(static_cast<intptr_t>(ctx->saved_data[key].toInt()));
}

// A node keeps the address of a handle, never its tensor (design D2).
inline void keep_handle(torch::autograd::AutogradContext* ctx, const char* key, const Handle* handle) {
  keep_address(ctx, key, handle);
}
inline const Handle* kept_handle(torch::autograd::AutogradContext* ctx, const char* key) {
  return kept_address<Handle>(ctx, key);
}

inline bool trains(const Handle* handle) {
  return handle != nullptr && handle->trainable();
}

// fp64 for fp64, otherwise fp32: the dtype of statistics and of gradients of weights.
inline at::ScalarType statistics_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

// Calls run(S{}) with the C++ type of an activation's dtype.
template <typename Run>
auto for_dtype(at::ScalarType dtype, const Run& run) {
  if (dtype == at::kBFloat16) return run(at::BFloat16());
  if (dtype == at::kFloat) return run(float());
  if (dtype == at::kDouble) return run(double());
  throw Bug("ops compute in float32, float64 or bfloat16; given {}", at::toString(dtype));
}

inline std::string shape_text(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.size(i));
  return text + "] " + at::toString(tensor.scalar_type());
}

// An op was called with tensors that do not fit: our own model code is wrong, so it is a Bug.
inline void require(bool fits, const char* op, const char* rule, const at::Tensor& a, const at::Tensor& b) {
  if (!fits) throw Bug("{}: {}; given {} and {}", op, rule, shape_text(a), shape_text(b));
}

}  // namespace titanium
