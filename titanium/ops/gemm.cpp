#include "titanium/ops/gemm.h"

#include <ATen/ATen.h>

#include "titanium/ops/graph.h"
#include "titanium/ops/linear.h"

namespace titanium {

at::Tensor sum_rows(const at::Tensor& g) {
  return g.sum(0, false, statistics_dtype(g.scalar_type()));
}

void add_rows(const at::Tensor& sink, const at::Tensor& ids, const at::Tensor& g) {
  sink.index_add_(0, ids, g.to(sink.scalar_type()));
}

void add_outer(const at::Tensor& sink, const at::Tensor& a, const at::Tensor& b) {
  require(a.dim() == 2 && b.dim() == 2 && a.size(0) == b.size(0) && sink.size(0) == a.size(1) &&
              sink.size(1) == b.size(1),
          "add_outer", "a is [T, M], b is [T, N], the sink [M, N]", a, b);
  sink.addmm_(a.to(sink.scalar_type()).t(), b.to(sink.scalar_type()));
}

}  // namespace titanium
