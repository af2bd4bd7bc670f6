#pragma once
#include "titanium/ops/handle.h"
#include "titanium/ops/row_exchange.h"

namespace titanium {

// gate_up [T, 2F] (gate first, then up) -> silu(gate) * up  [T, F].  Shazeer, "GLU variants improve
// transformer", 2020.
at::Tensor swiglu(const at::Tensor& gate_up);

// linear(swiglu(gate_up), weight, bias, residual, rows) as one op that keeps gate_up alone and forms swiglu
// again in backward.
at::Tensor swiglu_linear(const at::Tensor& gate_up, const Handle& weight, const Handle* bias,
                         const at::Tensor& residual, const RowExchange* rows = nullptr);

}  // namespace titanium
