#include "titanium/ops/sums.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>

#include "titanium/ops/graph.h"
#include "titanium/ops/vector.h"

namespace titanium {
namespace {

constexpr int64_t kColumns = 64;  // columns that one task owns

// to [width] += the rows of `from`, the first row first.
template <typename T, typename A>
TITANIUM_INLINE void add_row(A* to, const T* from, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes<A> <= width; i += kLanes<A>) store(to + i, load(to + i) + load_wide(from + i));
  for (; i < width; ++i) to[i] += static_cast<A>(from[i]);
}
TITANIUM_CLONES void add_one(float* to, const at::BFloat16* from, int64_t width) {
  add_row(to, from, width);
}
TITANIUM_CLONES void add_one(float* to, const float* from, int64_t width) {
  add_row(to, from, width);
}
TITANIUM_CLONES void add_one(double* to, const double* from, int64_t width) {
  add_row(to, from, width);
}

}  // namespace

at::Tensor sum_rows(const at::Tensor& g) {
  const at::Tensor rows = g.contiguous();
  const int64_t T = rows.size(0), O = rows.size(1);
  const at::Tensor total = at::zeros({O}, rows.options().dtype(statistics_dtype(rows.scalar_type())));
  for_dtype(rows.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    const S* from = rows.const_data_ptr<S>();
    Wide<S>* to = total.mutable_data_ptr<Wide<S>>();
    at::parallel_for(0, (O + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kColumns, last = std::min(O, end * kColumns);
      for (int64_t t = 0; t < T; ++t) add_one(to + first, from + t * O + first, last - first);
    });
  });
  return total;
}

void accumulate_bias(const Handle* bias, const at::Tensor& g) {
  if (!trains(bias)) return;
  const at::Tensor total = sum_rows(g);
  bias->accumulate([total](const at::Tensor& sink) { sink.add_(total); });
}

void add_rows(const at::Tensor& sink, const at::Tensor& ids, const at::Tensor& g) {
  const at::Tensor rows = g.contiguous(), flat = ids.contiguous();
  require(sink.dim() == 2 && rows.dim() == 2 && rows.size(1) == sink.size(1) &&
              flat.numel() == rows.size(0) && sink.stride(1) == 1 &&
              sink.scalar_type() == statistics_dtype(g.scalar_type()),
          "add_rows", "the sink is [V, D] in fp32 (fp64), the gradient [T, D]", sink, g);
  const int64_t T = rows.size(0), D = rows.size(1), stride = sink.stride(0);
  const int64_t* id = flat.const_data_ptr<int64_t>();
  for_dtype(rows.scalar_type(), [&](auto zero) {
    using S = decltype(zero);
    const S* from = rows.const_data_ptr<S>();
    Wide<S>* to = sink.mutable_data_ptr<Wide<S>>();
    at::parallel_for(0, (D + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = begin * kColumns, last = std::min(D, end * kColumns);
      for (int64_t t = 0; t < T; ++t)
        add_one(to + id[t] * stride + first, from + t * D + first, last - first);
    });
  });
}

}  // namespace titanium
