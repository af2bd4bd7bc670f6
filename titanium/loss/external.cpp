#include "titanium/loss/external.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// A scalar with a given value and given gradients by the inputs.
struct Surrogate : torch::autograd::Function<Surrogate> {
  static at::Tensor forward(AutogradContext* ctx, at::TensorList inputs, const variable_list& gradients,
                            double value) {
    (void)inputs;
    ctx->save_for_backward(gradients);
    return at::full({}, value, at::kDouble);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const variable_list gradients = ctx->get_saved_variables();
    variable_list out;
    for (const at::Tensor& g : gradients) out.push_back(g * grads[0].to(g.scalar_type()));
    out.resize(gradients.size() + 2);  // the other arguments have none
    return out;
  }
};

}  // namespace

LossSum ExternalLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  const auto detached = [](const at::Tensor& t) { return t.defined() ? t.detach() : t; };
  ExternalAnswer answer =
      ask_({detached(now.logprob), detached(now.entropy), detached(now.sum_pi_squared), detached(now.value)},
           batch);
  variable_list inputs, gradients;
  struct Pair {
    const char* name;
    const at::Tensor &statistic, &gradient;
  };
  for (const auto& [name, statistic, gradient] :
       {Pair{"log-probs", now.logprob, answer.gradient.logprob},
        Pair{"entropy", now.entropy, answer.gradient.entropy},
        Pair{"sum_pi_squared", now.sum_pi_squared, answer.gradient.sum_pi_squared},
        Pair{"values", now.value, answer.gradient.value}}) {
    if (!gradient.defined()) continue;
    if (!statistic.defined()) throw BadData("the loss has a gradient by {}, which it was not given", name);
    if (gradient.dim() != 1 || gradient.size(0) != statistic.size(0)) {
      throw BadData("the loss has a gradient of {} numbers by {}, of which there are {}", gradient.numel(),
                    name, statistic.size(0));
    }
    inputs.push_back(statistic);
    gradients.push_back(gradient.detach().to(statistic.scalar_type()));
  }
  if (inputs.empty()) return {at::full({}, answer.loss, at::kDouble), std::move(answer.reports)};
  return {Surrogate::apply(at::TensorList(inputs), gradients, answer.loss), std::move(answer.reports)};
}

}  // namespace titanium
