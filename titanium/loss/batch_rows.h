// Between the tensors of a micro-batch and the plain arrays of the losses.
#pragma once
#include <string>

#include "titanium/loss/rows.h"
#include "titanium/loss/token_stats.h"

namespace titanium {

// Documents that are samples; the mask is where the weight is not 0.
Rows rows_of(const PackedBatch& batch);

// A statistic as numbers.  BadConfig when the head does not have it: a loss for the other kind of model.
Column values_of(const at::Tensor& statistic, const PackedBatch& batch, const char* name);

// A column of the batch; zeros for a batch that is a filler alone.  BadData names the column and those there
// are.
const Column& column(const PackedBatch& batch, const std::string& name);
Column column_or_empty(const PackedBatch& batch, const std::string& name);
const std::vector<double>& seq_column(const PackedBatch& batch, const std::string& name);  // [D]

// A scalar with a given value and given gradients by statistics: what a loss is that knows its own
// derivative.
struct Part {
  at::Tensor statistic, gradient;  // [T]
};
at::Tensor with_gradient(double value, const std::vector<Part>& parts);
Part part(const at::Tensor& statistic, const Column& gradient);

}  // namespace titanium
