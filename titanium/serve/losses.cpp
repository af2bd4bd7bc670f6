#include "titanium/serve/losses.h"

#include <functional>
#include <iterator>
#include <optional>

#include "titanium/base/error.h"
#include "titanium/loss/policy_loss.h"
#include "titanium/loss/preference.h"
#include "titanium/loss/sft.h"
#include "titanium/loss/value_loss.h"

namespace titanium {
namespace {

// The settings of one loss, or of a part of one.  Each is read once; what is left over at the end is unknown.
// null is the same as absent.
class Settings {
 public:
  Settings(std::string where, Json json) : where_(std::move(where)), json_(std::move(json)) {
    if (!json_.is_object()) throw BadConfig("{} is {}, expected an object", where_, json_.dump());
  }

  void read(const char* key, double& value) {
    read(
        key, "a number", [](const Json& j) { return j.is_number(); },
        [&](const Json& j) { j.get_to(value); });
  }
  void read(const char* key, std::optional<double>& value) {
    double given = 0;
    const bool is_given = has(key);
    read(key, given);
    if (is_given) value = given;
  }
  void read(const char* key, bool& value) {
    read(
        key, "true or false", [](const Json& j) { return j.is_boolean(); },
        [&](const Json& j) { j.get_to(value); });
  }
  void read(const char* key, int64_t& value) {
    read(
        key, "an integer of 64 bits",
        [](const Json& j) {
          return j.is_number_integer() &&
                 (!j.is_number_unsigned() || j.get<uint64_t>() <= uint64_t{INT64_MAX});
        },
        [&](const Json& j) { j.get_to(value); });
  }
  void read(const char* key, std::string& value) {
    read(
        key, "a string", [](const Json& j) { return j.is_string(); },
        [&](const Json& j) { j.get_to(value); });
  }
  void part(const char* key, const std::function<void(Settings&)>& read_part) {
    known_.emplace_back(key);
    if (!has(key)) return;
    Settings inner(where_ + "." + key, json_[key]);
    read_part(inner);
    inner.finish();
    json_.erase(key);
  }
  void finish() {
    for (auto at = json_.begin(); at != json_.end();) at = at->is_null() ? json_.erase(at) : std::next(at);
    if (!json_.empty()) {
      throw BadConfig("{}: unknown setting '{}'; allowed: {}", where_, json_.begin().key(),
                      fmt::join(known_, ", "));
    }
  }

 private:
  bool has(const char* key) const { return json_.contains(key) && !json_.at(key).is_null(); }
  template <typename Is, typename Get>
  void read(const char* key, const char* expected, const Is& is, const Get& get) {
    known_.emplace_back(key);
    if (!has(key)) return;
    if (!is(json_[key]))
      throw BadConfig("{}.{} is {}, expected {}", where_, key, json_[key].dump(), expected);
    get(json_[key]);
    json_.erase(key);
  }

  std::string where_;
  Json json_;
  std::vector<std::string> known_;
};

std::unique_ptr<Loss> make_sft(Settings& s) {
  std::string averaging = "token-mean";
  std::optional<double> factor;
  s.read("loss_agg_mode", averaging);
  s.read("loss_scale_factor", factor);
  return std::make_unique<SftLoss>(averaging_from(averaging), factor.value_or(0));
}

std::unique_ptr<Loss> make_policy(Settings& s) {
  PolicyLossConfig c;
  s.read("clip_ratio", c.clip_ratio);
  s.read("clip_ratio_low", c.clip_ratio_low);
  s.read("clip_ratio_high", c.clip_ratio_high);
  s.read("clip_ratio_c", c.clip_ratio_c);
  s.read("loss_agg_mode", c.loss_agg_mode);
  s.read("loss_scale_factor", c.loss_scale_factor);
  s.read("entropy_coeff", c.entropy_coeff);
  s.read("calculate_entropy", c.calculate_entropy);
  s.read("use_kl_loss", c.use_kl_loss);
  s.read("kl_loss_coef", c.kl_loss_coef);
  s.read("kl_loss_type", c.kl_loss_type);
  s.read("tau_pos", c.tau_pos);
  s.read("tau_neg", c.tau_neg);
  s.read("seed", c.seed);
  s.part("policy_loss", [&c](Settings& p) {
    p.read("loss_mode", c.policy_loss.loss_mode);
    p.read("clip_cov_ratio", c.policy_loss.clip_cov_ratio);
    p.read("clip_cov_lb", c.policy_loss.clip_cov_lb);
    p.read("clip_cov_ub", c.policy_loss.clip_cov_ub);
    p.read("kl_cov_ratio", c.policy_loss.kl_cov_ratio);
    p.read("ppo_kl_coef", c.policy_loss.ppo_kl_coef);
    p.read("dro_beta", c.policy_loss.dro_beta);
  });
  s.part("rollout_correction", [&c](Settings& r) {
    r.read("rollout_is", c.rollout_correction.rollout_is);
    r.read("rollout_is_threshold", c.rollout_correction.rollout_is_threshold);
    r.read("rollout_is_batch_normalize", c.rollout_correction.rollout_is_batch_normalize);
    r.read("rollout_rs", c.rollout_correction.rollout_rs);
    r.read("rollout_rs_threshold", c.rollout_correction.rollout_rs_threshold);
    r.read("loss_type", c.rollout_correction.loss_type);
  });
  return std::make_unique<PolicyLoss>(std::move(c));
}

std::unique_ptr<Loss> make_value(Settings& s) {
  ValueLossConfig c;
  s.read("cliprange_value", c.cliprange_value);
  s.read("loss_agg_mode", c.loss_agg_mode);
  s.read("loss_scale_factor", c.loss_scale_factor);
  return std::make_unique<ValueLoss>(std::move(c));
}

std::unique_ptr<Loss> make_dpo(Settings& s) {
  DpoConfig c;
  s.read("beta", c.beta);
  s.read("label_smoothing", c.label_smoothing);
  s.read("use_reference", c.use_reference);
  return std::make_unique<DpoLoss>(c);
}

std::unique_ptr<Loss> make_reward_model(Settings& s) {
  RewardModelConfig c;
  s.read("use_margin", c.use_margin);
  s.read("center_rewards_coefficient", c.center_rewards_coefficient);
  return std::make_unique<RewardModelLoss>(c);
}

constexpr std::pair<const char*, std::unique_ptr<Loss> (*)(Settings&)> kMakers[] = {
    {"sft", make_sft},
    {"policy", make_policy},
    {"value", make_value},
    {"dpo", make_dpo},
    {"reward_model", make_reward_model},
};

}  // namespace

std::vector<std::string> loss_names() {
  std::vector<std::string> names;
  for (const auto& [name, maker] : kMakers) names.emplace_back(name);
  return names;
}

std::unique_ptr<Loss> make_loss(const Json& json) {
  const Json name = json.is_object() ? json.value("name", Json()) : Json();
  for (const auto& [known, maker] : kMakers) {
    if (name != known) continue;
    Json rest = json;
    rest.erase("name");
    Settings settings("loss " + name.get<std::string>(), std::move(rest));
    std::unique_ptr<Loss> loss = maker(settings);
    settings.finish();
    return loss;
  }
  throw BadConfig("loss: its name is {}; allowed: {}, external", name.dump(), fmt::join(loss_names(), ", "));
}

}  // namespace titanium
