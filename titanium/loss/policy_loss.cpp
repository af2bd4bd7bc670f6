#include "titanium/loss/policy_loss.h"

#include "titanium/loss/batch_rows.h"
#include "titanium/loss/kl.h"
#include "titanium/loss/policy_terms.h"

namespace titanium {
namespace {

Column weights_of(const Rows& rows, TermWeight kind, const PackedBatch& batch) {
  if (kind == TermWeight::kToken) return batch.weight;
  Column out(rows.tokens());
  for (int64_t d = 0; d < rows.documents(); ++d) {
    const auto i = static_cast<size_t>(d);
    const double n = static_cast<double>(rows.trained(d));
    rows.each(d, [&](size_t t) {
      out[t] = kind == TermWeight::kRow ? batch.row_weight.at(i) : batch.seq_weight.at(i) / n;
    });
  }
  return out;
}

}  // namespace

PolicyLoss::PolicyLoss(PolicyLossConfig config) : config_(std::move(config)) {
  config_.check();
}

HeadWants PolicyLoss::wants() const {
  return {.entropy = config_.entropy_coeff != 0 || config_.calculate_entropy, .sum_pi_squared = false};
}

Granularity PolicyLoss::granularity() const {
  const std::string& mode = config_.policy_loss.loss_mode;
  if (mode == "clip_cov" || mode == "kl_cov") return Granularity::kMicroBatch;
  if (mode == "bypass_mode" && config_.rollout_correction.rollout_is_batch_normalize) {
    return Granularity::kMicroBatch;
  }
  const bool of_tokens = mode != "gspo" && mode != "geo_mean" && mode != "sapo" && mode != "bypass_mode";
  return of_tokens ? Granularity::kToken : Granularity::kSequence;
}

LossSum PolicyLoss::operator()(const TokenStats& now, const PackedBatch& batch) const {
  const PolicyInput in{rows_of(batch), values_of(now.logprob, batch, "the log-probs"),
                       column(batch, "old_log_probs"), column(batch, "advantages"),
                       column_or_empty(batch, "rollout_is_weights")};
  const Rows& rows = in.rows;
  TokenNames names{batch.update, batch.sample};
  for (int64_t& sample : names.samples) sample += batch.first_sample;
  PolicyTerm term = policy_term(in, config_, names);
  const Column weight = weights_of(rows, term.weight, batch);
  Column slope(rows.tokens());
  double pg = 0;
  rows.each([&](size_t t) {
    pg += weight[t] * term.loss[t];
    slope[t] = weight[t] * term.slope[t];
  });
  double total = pg;
  LossSum out;
  out.reports = std::move(term.reports);
  out.reports["actor/pg_loss"] = Report::total(pg);
  std::vector<Part> parts;
  if (config_.use_kl_loss) {
    const KlEstimator estimator(config_.kl_loss_type);
    const Column& reference = column(batch, "ref_log_prob");
    double kl = 0;
    rows.each([&](size_t t) {
      const KlEstimate k = estimator(in.logprob[t], reference[t]);
      kl += batch.weight[t] * k.value;
      slope[t] += config_.kl_loss_coef * batch.weight[t] * k.slope;
    });
    total += config_.kl_loss_coef * kl;
    out.reports["kl_loss"] = Report::total(kl);
    out.reports["kl_coef"] = Report::mean(config_.kl_loss_coef, 1);
  }
  parts.push_back(part(now.logprob, slope));
  if (wants().entropy) {
    const Column entropy = values_of(now.entropy, batch, "the entropy");
    Column by_entropy(rows.tokens());
    double sum = 0;
    rows.each([&](size_t t) {
      sum += batch.weight[t] * entropy[t];
      by_entropy[t] = -config_.entropy_coeff * batch.weight[t];
    });
    total -= config_.entropy_coeff * sum;
    out.reports["actor/entropy_loss"] = Report::total(sum);
    parts.push_back(part(now.entropy, by_entropy));
  }
  out.loss = with_gradient(total, parts);
  return out;
}

}  // namespace titanium
