#include "titanium/loss/preference.h"

#include <cmath>
#include <map>

#include "titanium/base/error.h"
#include "titanium/loss/batch_rows.h"

namespace titanium {
namespace {

// log(1 + exp(x)) without overflow.
double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}
double sigmoid(double x) {
  return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x));
}

struct Pair {
  int64_t chosen = -1, rejected = -1;  // documents
  double weight = 0;                   // 1 / pairs of the global batch
};

std::vector<Pair> pairs_of(const PackedBatch& batch, const Rows& rows) {
  const std::vector<double>& chosen = seq_column(batch, "chosen");
  std::map<int64_t, Pair> by_group;
  for (int64_t d = 0; d < rows.documents(); ++d) {
    const auto i = static_cast<size_t>(d);
    const int64_t group = batch.group.at(i);
    if (group < 0) throw BadData("sample {} is in no pair: it has no group", batch.sample[i]);
    if (chosen[i] != 0 && chosen[i] != 1) {
      throw BadData("sample {}: column 'chosen' is {}; allowed: 1 and 0", batch.sample[i], chosen[i]);
    }
    Pair& pair = by_group[group];
    int64_t& place = chosen[i] == 1 ? pair.chosen : pair.rejected;
    if (place >= 0) {
      throw BadData("group {} has two samples that are {}; a pair has one chosen and one rejected", group,
                    chosen[i] == 1 ? "chosen" : "rejected");
    }
    place = d;
    // A mean over rows, twice: the two rows of a pair.
    pair.weight += batch.row_weight.at(i);
  }
  std::vector<Pair> pairs;
  for (const auto& [group, pair] : by_group) {
    if (pair.chosen < 0 || pair.rejected < 0) {
      throw BadData("group {} has no sample that is {}", group, pair.chosen < 0 ? "chosen" : "rejected");
    }
    pairs.push_back(pair);
  }
  return pairs;
}

}  // namespace

PairLoss sigmoid_pair_loss(double h, double label_smoothing) {
  const double eps = label_smoothing;
  return {(1 - eps) * softplus(-h) + eps * softplus(h), -(1 - eps) * sigmoid(-h) + eps * sigmoid(h)};
}

void DpoConfig::check() const {
  if (!(beta > 0) || !std::isfinite(beta)) throw BadConfig("dpo.beta = {}; allowed: a number > 0", beta);
  if (!(label_smoothing >= 0 && label_smoothing <= 0.5)) {
    throw BadConfig("dpo.label_smoothing = {}; allowed: 0 to 0.5", label_smoothing);
  }
}

DpoLoss::DpoLoss(DpoConfig config) : config_(config) {
  config_.check();
}

std::string DpoLoss::settings() const {
  const auto& [beta, smoothing, use_reference] = config_;
  return fmt::format("loss dpo\nbeta = {}\nlabel_smoothing = {}\nuse_reference = {}", beta, smoothing,
                     use_reference);
}

LossSum DpoLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  const Rows rows = rows_of(batch);
  const Column logprob = values_of(now.logprob, batch, "the log-probs");
  const Column* reference = config_.use_reference ? &column(batch, "ref_log_prob") : nullptr;
  const auto reward = [&](int64_t d) {
    return config_.beta *
           sum(rows, d, [&](size_t t) { return logprob[t] - (reference ? (*reference)[t] : 0); });
  };
  Column slope(rows.tokens());
  double total = 0;
  Report loss, chosen, rejected, margin, accuracy;
  for (const Pair& pair : pairs_of(batch, rows)) {
    const double c = reward(pair.chosen), r = reward(pair.rejected);
    const PairLoss p = sigmoid_pair_loss(c - r, config_.label_smoothing);
    total += pair.weight * p.loss;
    const double by_reward = pair.weight * p.slope * config_.beta;
    rows.each(pair.chosen, [&](size_t t) { slope[t] = by_reward; });
    rows.each(pair.rejected, [&](size_t t) { slope[t] = -by_reward; });
    loss.add(p.loss);
    chosen.add(c);
    rejected.add(r);
    margin.add(c - r);
    accuracy.add(c > r);
  }
  return {with_gradient(total, {part(now.logprob, slope)}),
          {{"dpo/loss", loss},
           {"rewards/chosen", chosen},
           {"rewards/rejected", rejected},
           {"rewards/margins", margin},
           {"rewards/accuracies", accuracy}}};
}

void RewardModelConfig::check() const {
  if (!(center_rewards_coefficient >= 0) || !std::isfinite(center_rewards_coefficient)) {
    throw BadConfig("reward_model.center_rewards_coefficient = {}; allowed: a number >= 0",
                    center_rewards_coefficient);
  }
}

RewardModelLoss::RewardModelLoss(RewardModelConfig config) : config_(config) {
  config_.check();
}

std::string RewardModelLoss::settings() const {
  const auto& [use_margin, center] = config_;
  return fmt::format("loss reward_model\nuse_margin = {}\ncenter_rewards_coefficient = {}", use_margin,
                     center);
}

LossSum RewardModelLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  const Rows rows = rows_of(batch);
  const Column value = values_of(now.value, batch, "the values");
  const std::vector<double>* margins = config_.use_margin ? &seq_column(batch, "margin") : nullptr;
  const auto last = [&](int64_t d) {
    return static_cast<size_t>(rows.bounds[static_cast<size_t>(d) + 1] - 1);
  };
  Column slope(rows.tokens());
  double total = 0;
  Report loss, accuracy, distance;
  for (const Pair& pair : pairs_of(batch, rows)) {
    const double c = value[last(pair.chosen)], r = value[last(pair.rejected)];
    const double margin = margins ? (*margins)[static_cast<size_t>(pair.chosen)] : 0;
    const PairLoss p = sigmoid_pair_loss(c - r - margin, 0);
    const double k = config_.center_rewards_coefficient, value_of_pair = p.loss + k * (c + r) * (c + r);
    total += pair.weight * value_of_pair;
    slope[last(pair.chosen)] = pair.weight * (p.slope + 2 * k * (c + r));
    slope[last(pair.rejected)] = pair.weight * (-p.slope + 2 * k * (c + r));
    loss.add(value_of_pair);
    accuracy.add(c > r);
    distance.add(c - r);
  }
  return {
      with_gradient(total, {part(now.value, slope)}),
      {{"reward_model/loss", loss}, {"reward_model/accuracy", accuracy}, {"reward_model/margin", distance}}};
}

}  // namespace titanium
