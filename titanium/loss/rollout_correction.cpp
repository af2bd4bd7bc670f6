#include "titanium/loss/rollout_correction.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "titanium/loss/rollout_options.h"

namespace titanium {
namespace {

constexpr double kBound = 20;  // of a log-ratio before exp
double bounded(double x) {
  return std::clamp(x, -kBound, kBound);
}

// The mean over a row's masked-in tokens; 0 for none.
template <typename Values>
double row_mean(const Rows& rows, int64_t d, const Values& values) {
  const int64_t n = rows.trained(d);
  return n > 0 ? sum(rows, d, values) / static_cast<double>(n) : 0;
}

struct Weighing {
  const Rows& rows;
  const Column& log_ratio;
  const Threshold threshold;
  bool of_sequences;
  Column raw, weights;  // [T], 0 where masked
  Reports& reports;

  void weigh() {
    raw.assign(rows.tokens(), 0);
    weights.assign(rows.tokens(), 0);
    for (int64_t d = 0; d < rows.documents(); ++d) {
      const double total = sum(rows, d, [&](size_t t) { return log_ratio[t]; });
      rows.each(d, [&](size_t t) {
        raw[t] = std::exp(bounded(of_sequences ? total : log_ratio[t]));
        weights[t] = threshold.lower ? (raw[t] >= *threshold.lower && raw[t] <= threshold.upper ? raw[t] : 0)
                                     : std::min(raw[t], threshold.upper);
      });
    }
  }

  void report() {
    const double upper = threshold.upper, lower = threshold.lower.value_or(1 / threshold.upper);
    const auto of = [&](const char* name, Report::Op op) -> Report& {
      return reports.emplace(std::string("rollout_corr/rollout_is_") + name, Report::of(op)).first->second;
    };
    Report &mean = of("mean", Report::kMean), &std = of("std", Report::kStd),
           &size = of("eff_sample_size", Report::kSampleSize), &max = of("max", Report::kMax),
           &min = of("min", Report::kMin), &high = of("ratio_fraction_high", Report::kMean),
           &low = of("ratio_fraction_low", Report::kMean);
    rows.each([&](size_t t) {
      mean.add(weights[t]);
      std.add(std::min(weights[t], upper));
      size.add(std::min(weights[t], upper));
      if (of_sequences) return;
      max.add(weights[t]);
      min.add(weights[t]);
      high.add(raw[t] > upper);
      low.add(raw[t] < lower);
    });
    Report &seq_mean = of("seq_mean", Report::kMean), &seq_std = of("seq_std", Report::kSampleStd),
           &seq_max = of("seq_max", Report::kMax), &seq_min = of("seq_min", Report::kMin),
           &deviation = of("seq_max_deviation", Report::kMax),
           &seq_high = of("seq_fraction_high", Report::kMean),
           &seq_low = of("seq_fraction_low", Report::kMean);
    for (int64_t d = 0; d < rows.documents(); ++d) {
      const double total = sum(rows, d, [&](size_t t) { return log_ratio[t]; });
      if (of_sequences) {
        max.add(std::exp(std::min(total, kBound)));
        min.add(std::exp(total));
        high.add(total > std::log(upper));
        low.add(total < std::log(lower));
      }
      const double w = row_mean(rows, d, [&](size_t t) { return weights[t]; });
      const double r = row_mean(rows, d, [&](size_t t) { return raw[t]; });
      seq_mean.add(w);
      seq_std.add(w);
      seq_max.add(w);
      seq_min.add(w);
      deviation.add(std::abs(w - 1));
      seq_high.add(r > upper);
      seq_low.add(r < lower);
    }
    if (threshold.lower) {
      Report& outside = of("oob_ratio", Report::kMean);
      rows.each([&](size_t t) { outside.add(raw[t] < lower || raw[t] > upper); });
    }
  }

  void normalize() {
    Report factor;
    if (of_sequences) {
      for (int64_t d = 0; d < rows.documents(); ++d) {
        if (rows.trained(d) > 0) factor.add(row_mean(rows, d, [&](size_t t) { return weights[t]; }));
      }
    } else {
      rows.each([&](size_t t) { factor.add(weights[t]); });
    }
    if (!(factor.value() > 1e-8)) factor = Report::mean(1, 1);
    for (double& w : weights) w /= factor.value();
    reports["rollout_corr/rollout_is_batch_norm_factor"] = factor;
  }
};

// One option of rejection: clears the mask of what does not pass, and reports.
void reject(const Rows& rows, const Column& log_ratio, const RejectionOption& option,
            std::vector<uint8_t>& mask, Reports& reports) {
  const auto statistic = [&](size_t t) {
    const double d = bounded(log_ratio[t]);
    return option.k == 1 ? -d : option.k == 2 ? d * d / 2 : std::expm1(d) - d;
  };
  const bool of_tokens = option.level == RejectionOption::kToken;
  const double upper = option.upper, lower = option.lower;  // -inf where there is none
  const bool has_lower = option.k == 1;
  const auto of = [&](const char* name, Report::Op op) -> Report& {
    return reports.emplace("rollout_corr/rollout_rs_" + option.name + "_" + name, Report::of(op))
        .first->second;
  };
  Report &mean = of("mean", Report::kMean), &max = of("max", Report::kMax), &min = of("min", Report::kMin),
         &high = of("fraction_high", Report::kMean), &low = of("fraction_low", Report::kMean),
         &std = of("std", Report::kStd), &masked = of("masked_fraction", Report::kMean),
         &seq_mean = of("seq_mean", Report::kMean), &seq_std = of("seq_std", Report::kSampleStd),
         &seq_max = of("seq_max", Report::kMax), &seq_min = of("seq_min", Report::kMin),
         &deviation = of("seq_max_deviation", Report::kMax),
         &seq_high = of("seq_fraction_high", Report::kMean),
         &seq_masked = of("seq_masked_fraction", Report::kMean);
  Report* seq_low = has_lower ? &of("seq_fraction_low", Report::kMean) : nullptr;
  for (int64_t d = 0; d < rows.documents(); ++d) {
    const int64_t n = rows.trained(d);
    if (n == 0) continue;
    double of_row = 0;
    switch (option.level) {
      case RejectionOption::kToken:
      case RejectionOption::kSeqMean:
        of_row = sum(rows, d, statistic) / static_cast<double>(n);
        break;
      case RejectionOption::kSeqSum:
        of_row = sum(rows, d, statistic);
        break;
      case RejectionOption::kSeqMax:
        of_row = -std::numeric_limits<double>::infinity();
        rows.each(d, [&](size_t t) { of_row = std::max(of_row, statistic(t)); });
        break;
    }
    bool any_rejected = false;
    rows.each(d, [&](size_t t) {
      const double x = of_tokens ? statistic(t) : of_row;
      const bool keep = x <= upper && (!has_lower || x >= lower);
      if (!keep) mask[t] = 0;
      any_rejected = any_rejected || !keep;
      mean.add(x);
      std.add(std::clamp(x, has_lower ? lower : 0.0, std::max(upper, has_lower ? lower : 0.0)));
      masked.add(!keep);
      if (!of_tokens) return;
      max.add(x);
      min.add(x);
      high.add(x > upper);
      low.add(has_lower && x < lower);
    });
    if (!of_tokens) {
      max.add(of_row);
      min.add(of_row);
      high.add(of_row > upper);
      low.add(has_lower && of_row < lower);
    }
    seq_mean.add(of_row);
    seq_std.add(of_row);
    seq_max.add(of_row);
    seq_min.add(of_row);
    deviation.add(std::abs(of_row));
    seq_high.add(of_row > upper);
    if (seq_low) seq_low->add(of_row < lower);
    seq_masked.add(any_rejected);
  }
}

}  // namespace

Reports off_policy_reports(const Rows& rows, const Column& logprob, const Column& rollout_logprob) {
  Reports reports;
  const auto of = [&](const char* name, Report::Op op = Report::kMean) -> Report& {
    return reports.emplace(std::string("rollout_corr/") + name, Report::of(op)).first->second;
  };
  Report &kl = of("kl"), &k3 = of("k3_kl"), &chi2 = of("chi2_token");
  rows.each([&](size_t t) {
    const double d = logprob[t] - rollout_logprob[t];
    kl.add(-d);
    k3.add(std::expm1(d) - d);
    chi2.add(std::expm1(2 * bounded(d)));
  });
  Report &ppl = of("training_ppl"), &log_ppl = of("training_log_ppl"), &rollout_ppl = of("rollout_ppl"),
         &rollout_log_ppl = of("rollout_log_ppl"), &diff = of("log_ppl_diff"),
         &abs_diff = of("log_ppl_abs_diff"), &diff_max = of("log_ppl_diff_max", Report::kMax),
         &diff_min = of("log_ppl_diff_min", Report::kMin), &ratio = of("ppl_ratio"),
         &chi2_seq = of("chi2_seq");
  for (int64_t d = 0; d < rows.documents(); ++d) {
    const double l = row_mean(rows, d, [&](size_t t) { return logprob[t]; });
    const double l_roll = row_mean(rows, d, [&](size_t t) { return rollout_logprob[t]; });
    ppl.add(std::exp(-l));
    log_ppl.add(-l);
    rollout_ppl.add(std::exp(-l_roll));
    rollout_log_ppl.add(-l_roll);
    diff.add(l_roll - l);
    abs_diff.add(std::abs(l_roll - l));
    diff_max.add(l_roll - l);
    diff_min.add(l_roll - l);
    ratio.add(std::exp(l_roll - l));
    chi2_seq.add(
        std::expm1(2 * bounded(sum(rows, d, [&](size_t t) { return logprob[t] - rollout_logprob[t]; }))));
  }
  return reports;
}

RolloutCorrection rollout_correction(const Rows& rows, const Column& logprob, const Column& rollout_logprob,
                                     const RolloutCorrectionConfig& config) {
  RolloutCorrection out;
  out.mask = rows.mask;
  Column log_ratio(rows.tokens());
  rows.each([&](size_t t) { log_ratio[t] = logprob[t] - rollout_logprob[t]; });
  if (!config.rollout_is.empty()) {
    Weighing weighing{rows,
                      log_ratio,
                      importance_threshold(config.rollout_is_threshold),
                      config.rollout_is == "sequence",
                      {},
                      {},
                      out.reports};
    weighing.weigh();
    weighing.report();
    if (config.rollout_is_batch_normalize) weighing.normalize();
    out.weights = std::move(weighing.weights);
  }
  if (!config.rollout_rs.empty()) {
    for (const RejectionOption& option : rejection_options(config.rollout_rs, config.rollout_rs_threshold)) {
      reject(rows, log_ratio, option, out.mask, out.reports);
    }
    Report &tokens = out.reports["rollout_corr/rollout_rs_masked_fraction"],
           &sequences = out.reports["rollout_corr/rollout_rs_seq_masked_fraction"];
    for (int64_t d = 0; d < rows.documents(); ++d) {
      bool any = false;
      rows.each(d, [&](size_t t) {
        tokens.add(!out.mask[t]);
        any = any || !out.mask[t];
      });
      sequences.add(any);
    }
  }
  add_reports(out.reports, off_policy_reports(rows, logprob, rollout_logprob));
  return out;
}

}  // namespace titanium
