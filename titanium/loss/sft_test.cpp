#include "titanium/loss/sft.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "titanium/batch/weights.h"

namespace titanium {
namespace {

PackedBatch weights_only(std::vector<double> weight) {
  PackedBatch batch;
  batch.weight = std::move(weight);
  return batch;
}

// Token losses [4] and [1, 1, 1] in two micro-batches, token-mean: 1.75, not the mean of means 2.5.
TEST(SftLoss, AccumulationIsTheFullBatch) {
  const SftLoss loss;
  const double w = 1.0 / 4;
  const auto a = loss({at::tensor({-4.0}), {}, {}}, weights_only({w}));
  const auto b = loss({at::tensor({-1.0, -1.0, -1.0}), {}, {}}, weights_only({w, w, w}));
  EXPECT_DOUBLE_EQ(a.loss.item<double>() + b.loss.item<double>(), 1.75);
}

TEST(SftLoss, GradientIsMinusTheWeight) {
  at::Tensor logprob = at::tensor({-0.5, -2.0, -3.0}, at::kDouble).requires_grad_();
  const auto sum = SftLoss()({logprob, {}, {}}, weights_only({0.25, 0, 0.75}));
  EXPECT_DOUBLE_EQ(sum.loss.item<double>(), 0.25 * 0.5 + 0.75 * 3);
  const auto grad = torch::autograd::grad({sum.loss}, {logprob});
  EXPECT_TRUE(at::equal(grad[0], at::tensor({-0.25, 0.0, -0.75}, at::kDouble)));
}

TEST(SftLoss, NothingToTrainOnIsZeroNotNan) {
  at::Tensor logprob = at::tensor({-0.5, -2.0}, at::kDouble).requires_grad_();
  const auto sum = SftLoss()({logprob, {}, {}}, weights_only({0, 0}));
  EXPECT_EQ(sum.loss.item<double>(), 0);
  EXPECT_TRUE(at::equal(torch::autograd::grad({sum.loss}, {logprob})[0], at::zeros({2}, at::kDouble)));
}

}  // namespace
}  // namespace titanium
