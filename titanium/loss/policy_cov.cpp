// Losses that hold back the tokens whose log-prob and advantage vary together, for these lower the entropy
// fastest.  Means are over the micro-batch, so the result depends on the cut.
#include <numeric>

#include "titanium/base/random.h"
#include "titanium/loss/policy_math.h"

namespace titanium {
namespace {

// (A - mean A) (l - mean l) at masked-in tokens.
Column covariances(const PolicyInput& in) {
  const double A = mean(in.rows, [&](size_t t) { return in.advantage[t]; });
  const double l = mean(in.rows, [&](size_t t) { return in.logprob[t]; });
  Column out(in.rows.tokens());
  in.rows.each([&](size_t t) { out[t] = (in.advantage[t] - A) * (in.logprob[t] - l); });
  return out;
}

// A number that is as good as random.  No log-prob has a part in it: a last bit that another layout rounds
// otherwise would draw other tokens.
uint64_t lot(const Random& random, int64_t update, int64_t sample, int64_t position) {
  const int64_t key[] = {update, sample, position};
  return random.bits(hash_name(reinterpret_cast<const char*>(key), sizeof key));
}

}  // namespace

PolicyTerm clip_cov(const PolicyInput& in, const PolicyLossConfig& config, const TokenNames& names) {
  PolicyTerm term = empty_term(in);
  const auto& settings = config.policy_loss;
  const Column v = covariances(in);
  const Random random(static_cast<uint64_t>(config.seed), Purpose::kLoss);
  std::vector<std::pair<uint64_t, size_t>> candidates;
  for (int64_t d = 0; d < in.rows.documents(); ++d) {
    in.rows.each(d, [&](size_t t) {
      const double A = in.advantage[t], u = std::exp(log_ratio(in, t));
      const double a = -A * u, b = -A * std::clamp(u, 1 - config.low(), 1 + config.high());
      set(term, in, t, std::max(a, b), b > a ? 0 : a);
      if (b > a || !(v[t] > settings.clip_cov_lb && v[t] < settings.clip_cov_ub)) return;
      const int64_t position = static_cast<int64_t>(t) - in.rows.bounds[static_cast<size_t>(d)];
      candidates.emplace_back(lot(random, names.update, names.samples.at(static_cast<size_t>(d)), position),
                              t);
    });
  }
  const double n = static_cast<double>(in.rows.trained());
  const size_t drop = std::min(candidates.size(),
                               static_cast<size_t>(std::max(std::floor(settings.clip_cov_ratio * n), 1.0)));
  std::sort(candidates.begin(), candidates.end());
  for (size_t i = 0; i < drop; ++i) term.loss[candidates[i].second] = term.slope[candidates[i].second] = 0;
  term.reports = {{"actor/pg_clipfrac", Report::mean(static_cast<double>(drop), n)},
                  {"actor/ppo_kl", ppo_kl(in, false)}};
  return term;
}

PolicyTerm kl_cov(const PolicyInput& in, const PolicyLossConfig& config) {
  PolicyTerm term = empty_term(in);
  const Column v = covariances(in);
  std::vector<size_t> order;
  in.rows.each([&](size_t t) { order.push_back(t); });
  const double n = static_cast<double>(order.size());
  const size_t held = std::min(
      order.size(), static_cast<size_t>(std::max(std::floor(config.policy_loss.kl_cov_ratio * n), 1.0)));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return v[a] > v[b]; });
  for (size_t i = 0; i < order.size(); ++i) {
    const size_t t = order[i];
    const double A = in.advantage[t], d = log_ratio(in, t), u = std::exp(d);
    const double coef = i < held ? config.policy_loss.ppo_kl_coef : 0;
    const double sign = d > 0 ? 1 : d < 0 ? -1 : 0;
    set(term, in, t, -A * u + coef * std::abs(d), -A * u + coef * sign);
  }
  term.reports = {
      {"actor/ppo_kl", token_report(in.rows, [&](size_t t) { return std::abs(log_ratio(in, t)); })}};
  return term;
}

}  // namespace titanium
