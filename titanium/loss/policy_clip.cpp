// Losses that clip the ratio: of tokens (vanilla), of sequences (gspo), of rows in log space (geo_mean).
#include "titanium/loss/policy_math.h"

namespace titanium {
namespace {

// max(-A r, -A clamp(r)): value, derivative, whether the clipped side was larger.
struct Clipped {
  double loss, slope;
  bool clipped;
};
Clipped clip(double advantage, Ratio r, double low, double high) {
  const double plain = -advantage * r.value;
  const double cut = -advantage * std::clamp(r.value, 1 - low, 1 + high);
  // Where the cut side is larger the ratio is outside the interval, and the clamp has no gradient.
  return cut > plain ? Clipped{cut, 0, true} : Clipped{plain, -advantage * r.slope, false};
}

}  // namespace

PolicyTerm vanilla(const PolicyInput& in, const PolicyLossConfig& config) {
  PolicyTerm term = empty_term(in);
  Report clipped, lower;
  in.rows.each([&](size_t t) {
    const double A = in.advantage[t], bound = -A * config.clip_ratio_c;
    Clipped c = clip(A, clamped_ratio(log_ratio(in, t)), config.low(), config.high());
    const bool bounded = A < 0 && c.loss > bound;
    if (bounded) c = {bound, 0, c.clipped};
    set(term, in, t, c.loss, c.slope);
    clipped.add(c.clipped);
    lower.add(bounded);
  });
  term.reports = {
      {"actor/pg_clipfrac", clipped}, {"actor/pg_clipfrac_lower", lower}, {"actor/ppo_kl", ppo_kl(in, true)}};
  return term;
}

PolicyTerm gspo(const PolicyInput& in, const PolicyLossConfig& config) {
  PolicyTerm term = empty_term(in);
  Report clipped;
  for (int64_t d = 0; d < in.rows.documents(); ++d) {
    const double n = static_cast<double>(std::max<int64_t>(in.rows.trained(d), 1));
    const double s = sum(in.rows, d, [&](size_t t) { return log_ratio(in, t); }) / n;
    const double q = std::exp(std::min(s, 10.0));
    in.rows.each(d, [&](size_t t) {
      const Clipped c = clip(in.advantage[t], {q, s <= 10 ? q : 0}, config.low(), config.high());
      set(term, in, t, c.loss, c.slope);
      clipped.add(c.clipped);
    });
  }
  term.reports = {{"actor/pg_clipfrac", clipped},
                  {"actor/pg_clipfrac_lower", Report::mean(0, clipped.count)},
                  {"actor/ppo_kl", ppo_kl(in, false)}};
  return term;
}

PolicyTerm geo_mean(const PolicyInput& in, const PolicyLossConfig& config) {
  PolicyTerm term = empty_term(in);
  term.weight = TermWeight::kRow;
  const double low = config.low(), high = config.high();
  Report up, down;
  for (int64_t b = 0; b < in.rows.documents(); ++b) {
    const int64_t trained = in.rows.trained(b);
    if (trained == 0) continue;
    const double n = static_cast<double>(trained);
    const auto is_clipped = [&](size_t t) {
      const double d = log_ratio(in, t);
      return d < -low || d > high;
    };
    // z = sign(A) min(sign(A) d, sign(A) clamp(d)): clipped where that lowers the gain.
    const auto cut = [&](size_t t) {
      const double A = in.advantage[t], d = log_ratio(in, t);
      return A == 0 || (A > 0 ? d > high : d < -low);
    };
    const auto z = [&](size_t t) {
      const double A = in.advantage[t], d = log_ratio(in, t);
      if (A == 0) return 0.0;
      return cut(t) ? std::clamp(d, -low, high) : d;
    };
    const double G = std::exp(sum(in.rows, b, z) / n);
    const double a = sum(in.rows, b, [&](size_t t) { return in.advantage[t]; }) / n;
    double row_loss = -a * G;
    if (!in.rollout_weight.empty()) {
      row_loss *=
          std::exp(sum(in.rows, b, [&](size_t t) { return std::log(in.rollout_weight[t] + 1e-10); }) / n);
    }
    in.rows.each(b, [&](size_t t) {
      term.loss[t] = row_loss / n;
      term.slope[t] = cut(t) ? 0 : row_loss / n;
      up.add(is_clipped(t) && in.advantage[t] > 0);
      down.add(is_clipped(t) && in.advantage[t] < 0);
    });
  }
  term.reports = {
      {"actor/pg_clipfrac", up}, {"actor/pg_clipfrac_lower", down}, {"actor/ppo_kl", ppo_kl(in, false)}};
  return term;
}

}  // namespace titanium
