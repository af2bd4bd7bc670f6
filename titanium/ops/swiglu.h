#pragma once
#include "titanium/ops/handle.h"

namespace titanium {

// gate_up [T, 2F] (gate first, then up) -> silu(gate) * up  [T, F].  Shazeer, "GLU variants improve
// transformer", 2020.
at::Tensor swiglu(const at::Tensor& gate_up);

// residual + linear(swiglu(gate_up), weight, bias) as one op that keeps gate_up alone and forms swiglu again
// in backward.
at::Tensor swiglu_linear(const at::Tensor& gate_up, const Handle& weight, const Handle* bias,
                         const at::Tensor& residual);

}  // namespace titanium
