// Losses that go along the policy gradient, softened (sapo), plain (gpg), held near the old policy by a
// square (dro), or with a ratio that is a constant factor (cispo).
#include "titanium/loss/policy_math.h"

namespace titanium {

PolicyTerm sapo(const PolicyInput& in, const PolicyLossConfig& config) {
  PolicyTerm term = empty_term(in);
  term.weight = TermWeight::kSequence;
  in.rows.each([&](size_t t) {
    const double A = in.advantage[t], tau = A > 0 ? config.tau_pos : config.tau_neg;
    const Ratio r = clamped_ratio(log_ratio(in, t));
    const double gate = 1 / (1 + std::exp(-tau * (r.value - 1)));
    set(term, in, t, -A * (4 / tau) * gate, -A * 4 * gate * (1 - gate) * r.slope);
  });
  const double n = static_cast<double>(in.rows.trained());
  term.reports = {{"actor/pg_clipfrac", Report::mean(0, n)},
                  {"actor/pg_clipfrac_lower", Report::mean(0, n)},
                  {"actor/ppo_kl", ppo_kl(in, true)}};
  return term;
}

PolicyTerm gpg(const PolicyInput& in, const PolicyLossConfig&) {
  PolicyTerm term = empty_term(in);
  in.rows.each([&](size_t t) { set(term, in, t, -in.advantage[t] * in.logprob[t], -in.advantage[t]); });
  return term;
}

PolicyTerm dro(const PolicyInput& in, const PolicyLossConfig& config) {
  PolicyTerm term = empty_term(in);
  const double beta = config.policy_loss.dro_beta;
  in.rows.each([&](size_t t) {
    const double A = in.advantage[t], d = log_ratio(in, t);
    set(term, in, t, -A * in.logprob[t] + beta / 2 * d * d, -A + beta * d);
  });
  term.reports = {{"actor/ppo_kl", ppo_kl(in, false)}};
  return term;
}

PolicyTerm cispo(const PolicyInput& in, const PolicyLossConfig& config) {
  PolicyTerm term = empty_term(in);
  Report clipped;
  in.rows.each([&](size_t t) {
    const double A = in.advantage[t], r = clamped_ratio(log_ratio(in, t)).value;
    const double factor = std::clamp(r, 1 - config.low(), 1 + config.high());
    set(term, in, t, -factor * A * in.logprob[t], -factor * A);
    clipped.add(r != factor);
  });
  term.reports = {{"actor/pg_clipfrac", clipped},
                  {"actor/pg_clipfrac_lower", Report::mean(0, clipped.count)},
                  {"actor/ppo_kl", ppo_kl(in, true)}};
  return term;
}

}  // namespace titanium
