// A trust region on probabilities instead of ratios: a token that has moved too far in the direction of its
// advantage is left out.
#include "titanium/loss/policy_math.h"

namespace titanium {
namespace {

// keep(A, l, l_old) says whether a token is within the region.
template <typename Keep>
PolicyTerm trust_region(const PolicyInput& in, const PolicyLossConfig& config, const Keep& keep) {
  PolicyTerm term = empty_term(in);
  Report left_out, truncated;
  in.rows.each([&](size_t t) {
    const double A = in.advantage[t], r = clamped_ratio(log_ratio(in, t)).value;
    const bool kept = keep(A, in.logprob[t], in.old_logprob[t]);
    const double factor = kept ? std::min(r, config.clip_ratio_c) : 0;
    set(term, in, t, -A * factor * in.logprob[t], -A * factor);
    left_out.add(!kept);
    truncated.add(kept && r > config.clip_ratio_c);
  });
  term.reports = {{"actor/pg_clipfrac", left_out},
                  {"actor/pg_clipfrac_lower", truncated},
                  {"actor/ppo_kl", ppo_kl(in, true)}};
  return term;
}

}  // namespace

PolicyTerm dppo_tv(const PolicyInput& in, const PolicyLossConfig& config) {
  return trust_region(in, config, [&](double A, double l, double l_old) {
    const double moved = std::exp(l) - std::exp(l_old);
    return A > 0 ? moved <= config.high() : moved >= -config.low();
  });
}

PolicyTerm dppo_kl(const PolicyInput& in, const PolicyLossConfig& config) {
  return trust_region(in, config, [&](double A, double l, double l_old) {
    const double p = std::exp(l), p_old = std::exp(l_old);
    const double k = p_old * (l_old - l) + (1 - p_old) * std::log((1 - p_old + 1e-8) / (1 - p + 1e-8));
    return A > 0 ? k <= config.high() || p <= p_old : k <= config.low() || p >= p_old;
  });
}

}  // namespace titanium
