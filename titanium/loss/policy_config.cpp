#include "titanium/loss/policy_config.h"

#include <cmath>
#include <initializer_list>

#include "titanium/base/error.h"
#include "titanium/loss/kl.h"
#include "titanium/loss/policy_terms.h"

namespace titanium {
namespace {

struct Mode {
  const char* name;
  PolicyTerm (*term)(const PolicyInput&, const PolicyLossConfig&);
};
constexpr Mode kModes[] = {{"vanilla", vanilla}, {"gspo", gspo},         {"sapo", sapo},
                           {"gpg", gpg},         {"dro", dro},           {"cispo", cispo},
                           {"dppo_tv", dppo_tv}, {"dppo_kl", dppo_kl},   {"clip_cov", nullptr},
                           {"kl_cov", kl_cov},   {"geo_mean", geo_mean}, {"bypass_mode", bypass_mode}};

const Mode& mode(const std::string& name) {
  std::string allowed;
  for (const Mode& m : kModes) {
    if (name == m.name) return m;
    allowed += (allowed.empty() ? "" : ", ") + std::string(m.name);
  }
  throw BadConfig("policy_loss.loss_mode = '{}'; allowed: {}", name, allowed);
}

void require(bool fine, const char* key, double given, const char* allowed) {
  if (!fine || !std::isfinite(given)) throw BadConfig("{} = {}; allowed: {}", key, given, allowed);
}

}  // namespace

void PolicyLossConfig::check() const {
  mode(policy_loss.loss_mode);
  require(clip_ratio >= 0, "clip_ratio", clip_ratio, "a number >= 0");
  require(low() >= 0, "clip_ratio_low", low(), "a number >= 0");
  require(high() >= 0, "clip_ratio_high", high(), "a number >= 0");
  require(clip_ratio_c > 1, "clip_ratio_c", clip_ratio_c, "a number > 1");
  try {
    averaging();
  } catch (const BadConfig& e) {
    throw BadConfig("loss_agg_mode: {}", e.what());
  }
  if (averaging() == Averaging::kSeqMeanTokenSumNorm) {
    if (!loss_scale_factor) {
      throw BadConfig(
          "loss_scale_factor is not given; allowed with loss_agg_mode = seq-mean-token-sum-norm: a number "
          "> 0 (not the width of a batch: the loss would depend on its padding)");
    }
    require(*loss_scale_factor > 0, "loss_scale_factor", *loss_scale_factor, "a number > 0");
  }
  require(true, "entropy_coeff", entropy_coeff, "a finite number");
  require(true, "kl_loss_coef", kl_loss_coef, "a finite number");
  if (use_kl_loss) KlEstimator estimator(kl_loss_type);
  require(tau_pos > 0, "tau_pos", tau_pos, "a number > 0");
  require(tau_neg > 0, "tau_neg", tau_neg, "a number > 0");
  const auto& p = policy_loss;
  const auto share = [](double x) { return x >= 0 && x <= 1; };
  require(share(p.clip_cov_ratio), "policy_loss.clip_cov_ratio", p.clip_cov_ratio, "0 to 1");
  require(p.clip_cov_lb < p.clip_cov_ub, "policy_loss.clip_cov_lb", p.clip_cov_lb, "less than clip_cov_ub");
  require(share(p.kl_cov_ratio), "policy_loss.kl_cov_ratio", p.kl_cov_ratio, "0 to 1");
  require(p.ppo_kl_coef >= 0, "policy_loss.ppo_kl_coef", p.ppo_kl_coef, "a number >= 0");
  require(p.dro_beta > 0, "policy_loss.dro_beta", p.dro_beta, "a number > 0");
  rollout_correction.check();
}

// Bound by name, so that a new setting does not compile until it is here.
std::string settings(const PolicyLossConfig& config) {
  const auto& [clip, clip_low, clip_high, clip_c, averaging, scale, entropy_coeff, calculate_entropy, use_kl,
               kl_coef, kl_type, tau_pos, tau_neg, policy, rollout, seed] = config;
  const auto& [mode, cov_ratio, cov_lb, cov_ub, kl_cov_ratio, ppo_kl_coef, dro_beta] = policy;
  const auto& [is, is_threshold, is_normalize, rs, rs_threshold, loss_type] = rollout;
  std::string out = "loss policy";
  const auto line = [&](const char* key, const auto& value) { out += fmt::format("\n{} = {}", key, value); };
  line("loss_mode", mode);
  line("clip_ratio", clip);
  line("clip_ratio_low", clip_low.value_or(clip));
  line("clip_ratio_high", clip_high.value_or(clip));
  line("clip_ratio_c", clip_c);
  line("loss_agg_mode", averaging);
  line("loss_scale_factor", scale.value_or(0));
  line("entropy_coeff", entropy_coeff);
  line("calculate_entropy", calculate_entropy);
  line("use_kl_loss", use_kl);
  line("kl_loss_coef", kl_coef);
  line("kl_loss_type", kl_type);
  line("tau_pos", tau_pos);
  line("tau_neg", tau_neg);
  line("clip_cov_ratio", cov_ratio);
  line("clip_cov_lb", cov_lb);
  line("clip_cov_ub", cov_ub);
  line("kl_cov_ratio", kl_cov_ratio);
  line("ppo_kl_coef", ppo_kl_coef);
  line("dro_beta", dro_beta);
  line("rollout_is", is);
  line("rollout_is_threshold", is_threshold);
  line("rollout_is_batch_normalize", is_normalize);
  line("rollout_rs", rs);
  line("rollout_rs_threshold", rs_threshold);
  line("loss_type", loss_type);
  line("seed", seed);
  return out;
}

PolicyTerm policy_term(const PolicyInput& in, const PolicyLossConfig& config, const TokenNames& names) {
  const Mode& m = mode(config.policy_loss.loss_mode);
  return m.term ? m.term(in, config) : clip_cov(in, config, names);
}

}  // namespace titanium
