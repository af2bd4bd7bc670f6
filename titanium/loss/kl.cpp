#include "titanium/loss/kl.h"

#include <algorithm>
#include <cmath>

#include "titanium/base/error.h"

namespace titanium {

KlEstimator::KlEstimator(const std::string& name, const std::string& key) {
  straight_through_ = name.ends_with('+');
  const std::string base = straight_through_ ? name.substr(0, name.size() - 1) : name;
  if (base == "k1" || base == "kl") {
    kind_ = Kind::kK1;
  } else if (base == "abs") {
    kind_ = Kind::kAbs;
  } else if (base == "k2" || base == "mse") {
    kind_ = Kind::kK2;
  } else if (base == "k3" || base == "low_var_kl") {
    kind_ = Kind::kK3;
  } else {
    throw BadConfig(
        "{} = '{}'; allowed: k1 (kl), abs, k2 (mse), k3 (low_var_kl), each also with a trailing +", key,
        name);
  }
}

KlEstimate KlEstimator::operator()(double logprob, double reference) const {
  const double d = logprob - reference;
  KlEstimate out;
  switch (kind_) {
    case Kind::kK1:
      out = {d, 1};
      break;
    case Kind::kAbs:
      out = {std::abs(d), d > 0 ? 1.0 : d < 0 ? -1.0 : 0.0};
      break;
    case Kind::kK2:
      out = {d * d / 2, d};
      break;
    case Kind::kK3: {
      const double q = std::clamp(-d, -20.0, 20.0), value = std::expm1(q) - q;
      // The value is never negative, and beyond 10 wherever q is cut.
      out = {std::min(value, 10.0), value > 10 ? 0.0 : -std::expm1(q)};
      break;
    }
  }
  if (straight_through_) out.slope = d;
  return out;
}

KlInReward kl_in_reward(const Rows& rows, const Column& scores, const Column& old_logprob,
                        const Column& ref_logprob, const KlEstimator& estimator, double coef) {
  KlInReward out{scores, 0};
  for (int64_t d = 0; d < rows.documents(); ++d) {
    double total = 0;
    int64_t n = 0;
    rows.each(d, [&](size_t t) {
      const double kl = estimator(old_logprob[t], ref_logprob[t]).value;
      out.rewards[t] -= coef * kl;
      total += kl;
      ++n;
    });
    if (n > 0) out.current_kl += total / static_cast<double>(n);
  }
  if (rows.documents() > 0) out.current_kl /= static_cast<double>(rows.documents());
  return out;
}

AdaptiveKl::AdaptiveKl(double coef, double target, double horizon)
    : coef_(coef), target_(target), horizon_(horizon) {
  if (!(target > 0)) throw BadConfig("kl_ctrl.target_kl = {}; allowed: > 0", target);
  if (!(horizon > 0)) throw BadConfig("kl_ctrl.horizon = {}; allowed: > 0", horizon);
}

void AdaptiveKl::update(double current_kl, double steps) {
  coef_ *= 1 + std::clamp(current_kl / target_ - 1, -0.2, 0.2) * steps / horizon_;
}

}  // namespace titanium
