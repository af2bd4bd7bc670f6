#include "titanium/loss/external.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/batch/pack.h"
#include "titanium/loss/batch_rows.h"

namespace titanium {

std::string ExternalLoss::settings() const {
  return fmt::format("loss external\nentropy = {}\nsum_pi_squared = {}\ngranularity = {}", wants_.entropy,
                     wants_.sum_pi_squared, static_cast<int>(granularity_));
}

LossSum ExternalLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  if (std::all_of(batch.sample.begin(), batch.sample.end(), [](int64_t i) { return i == kFiller; }))
    return {at::zeros({}, at::kDouble), {}};
  const auto detached = [](const at::Tensor& t) { return t.defined() ? t.detach() : t; };
  ExternalAnswer answer =
      ask_({detached(now.logprob), detached(now.entropy), detached(now.sum_pi_squared), detached(now.value)},
           batch);
  struct Given {
    const char* name;
    const at::Tensor &statistic, &gradient;
  };
  std::vector<Part> parts;
  for (const auto& [name, statistic, gradient] :
       {Given{"log-probs", now.logprob, answer.gradient.logprob},
        Given{"entropy", now.entropy, answer.gradient.entropy},
        Given{"sum_pi_squared", now.sum_pi_squared, answer.gradient.sum_pi_squared},
        Given{"values", now.value, answer.gradient.value}}) {
    if (!gradient.defined()) continue;
    if (!statistic.defined()) {
      throw BadData(
          "the loss has a gradient by {}, which it was not given: a language_model gives log-probs, with "
          "calculate_entropy and calculate_sum_pi_squared these too; a value_model values",
          name);
    }
    if (gradient.dim() != 1 || gradient.size(0) != statistic.size(0)) {
      throw BadData("the loss has a gradient of {} numbers by {}, of which there are {}", gradient.numel(),
                    name, statistic.size(0));
    }
    parts.push_back({statistic, gradient});
  }
  return {with_gradient(answer.loss, parts), std::move(answer.reports)};
}

}  // namespace titanium
