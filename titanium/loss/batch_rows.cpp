#include "titanium/loss/batch_rows.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "titanium/base/error.h"
#include "titanium/batch/pack.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct KnownGradient : torch::autograd::Function<KnownGradient> {
  static at::Tensor forward(AutogradContext* ctx, at::TensorList statistics, const variable_list& gradients,
                            double value) {
    (void)statistics;
    ctx->save_for_backward(gradients);
    return at::full({}, value, at::kDouble);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list out;
    for (const at::Tensor& g : ctx->get_saved_variables()) {
      out.push_back(g * grads[0].to(g.device(), g.scalar_type()));
    }
    out.resize(out.size() + 2);  // the gradients and the value have none
    return out;
  }
};

template <typename Columns>
const auto* find(const Columns& columns, const PackedBatch& batch, const std::string& name) {
  const auto found = columns.find(name);
  if (found != columns.end()) return &found->second;
  for (int64_t sample : batch.sample) {
    if (sample == kFiller) continue;
    std::string known;
    for (const auto& [other, values] : columns) known += (known.empty() ? "" : ", ") + other;
    throw BadData("the loss needs column '{}'; the batch has {}", name, known.empty() ? "none" : known);
  }
  return static_cast<decltype(&found->second)>(nullptr);
}

// A nan where a token is trained on would pass through some losses unseen (every comparison with it is false)
// and would reach the weights by others.  Elsewhere nobody reads the column.
void require_finite(const PackedBatch& batch, const std::string& name, const Column& values) {
  for (int64_t d = 0; d < batch.documents(); ++d) {
    const int64_t sample = batch.sample.at(static_cast<size_t>(d));
    const int64_t begin = batch.bounds[static_cast<size_t>(d)],
                  end = batch.bounds[static_cast<size_t>(d) + 1];
    for (int64_t t = begin; sample != kFiller && t < end; ++t) {
      const auto i = static_cast<size_t>(t);
      if (batch.weight.at(i) == 0 || std::isfinite(values.at(i))) continue;
      throw BadData(
          "sample {}, token {}: column '{}' is {}; allowed where a token is trained on: finite numbers",
          sample, t - begin + 1, name, values[i]);
    }
  }
}

}  // namespace

Rows rows_of(const PackedBatch& batch) {
  Rows rows;
  rows.mask.resize(static_cast<size_t>(batch.size()));
  for (size_t t = 0; t < rows.mask.size(); ++t) rows.mask[t] = batch.weight.at(t) != 0;
  for (int64_t d = 0; d < batch.documents() && batch.sample.at(static_cast<size_t>(d)) != kFiller; ++d) {
    rows.bounds.push_back(batch.bounds[static_cast<size_t>(d) + 1]);
  }
  return rows;
}

Column values_of(const at::Tensor& statistic, const PackedBatch& batch, const char* name) {
  if (!statistic.defined()) {
    throw BadConfig(
        "the loss needs {}, which this engine does not have: a language_model has log-probs, a value_model "
        "values",
        name);
  }
  if (statistic.dim() != 1 || statistic.size(0) != batch.size()) {
    throw Bug("{} of {} tokens, but the batch has {}", name, statistic.numel(), batch.size());
  }
  const at::Tensor values = statistic.detach().to(at::kCPU, at::kDouble).contiguous();
  return Column(values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel());
}

const Column& column(const PackedBatch& batch, const std::string& name) {
  const Column* found = find(batch.columns, batch, name);
  if (found) require_finite(batch, name, *found);
  return found ? *found : batch.weight;  // of a filler alone: zeros of the right length
}

Column column_or_empty(const PackedBatch& batch, const std::string& name) {
  const auto found = batch.columns.find(name);
  if (found == batch.columns.end()) return {};
  require_finite(batch, name, found->second);
  return found->second;
}

const std::vector<double>& seq_column(const PackedBatch& batch, const std::string& name) {
  const std::vector<double>* found = find(batch.seq_columns, batch, name);
  for (size_t d = 0; found && d < found->size() && batch.sample.at(d) != kFiller; ++d) {
    if (!std::isfinite((*found)[d]))
      throw BadData("sample {}: column '{}' is {}; allowed: finite numbers", batch.sample[d], name,
                    (*found)[d]);
  }
  return found ? *found : batch.seq_weight;
}

at::Tensor with_gradient(double value, const std::vector<Part>& parts) {
  variable_list statistics, gradients;
  for (const Part& part : parts) {
    statistics.push_back(part.statistic);
    gradients.push_back(part.gradient.detach().to(part.statistic.device(), part.statistic.scalar_type()));
  }
  if (parts.empty()) return at::full({}, value, at::kDouble);
  return KnownGradient::apply(at::TensorList(statistics), gradients, value);
}

Part part(const at::Tensor& statistic, const Column& gradient) {
  return {statistic, at::tensor(at::ArrayRef<double>(gradient), at::kDouble)};
}

}  // namespace titanium
