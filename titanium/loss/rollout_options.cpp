#include "titanium/loss/rollout_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "titanium/base/error.h"
#include "titanium/loss/rollout_correction.h"

namespace titanium {
namespace {

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t"), end = text.find_last_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

// Parts between commas, without empty ones.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string part = trimmed(text.substr(begin, comma - begin));
    if (!part.empty()) parts.push_back(part);
    begin = comma + 1;
  }
  return parts;
}

// "hi" or "lo_hi", both > 0.
Threshold threshold(const std::string& text, const char* key) {
  const auto number = [&](const std::string& part) {
    double value = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || end != part.data() + part.size() || !(value > 0) || !std::isfinite(value)) {
      throw BadConfig("rollout_correction.{} = '{}'; allowed: a number > 0, or two as lo_hi", key, text);
    }
    return value;
  };
  const size_t bar = text.find('_');
  if (bar == std::string::npos) return {number(text), {}};
  Threshold out{number(text.substr(bar + 1)), number(text.substr(0, bar))};
  if (*out.lower > out.upper) {
    throw BadConfig("rollout_correction.{} = '{}'; allowed: lo_hi with lo <= hi", key, text);
  }
  return out;
}

constexpr std::pair<const char*, RejectionOption::Level> kLevels[] = {
    {"token_k", RejectionOption::kToken},
    {"seq_sum_k", RejectionOption::kSeqSum},
    {"seq_mean_k", RejectionOption::kSeqMean},
    {"seq_max_k", RejectionOption::kSeqMax},
};

RejectionOption option(const std::string& name) {
  for (const auto& [prefix, level] : kLevels) {
    if (!name.starts_with(prefix) || name.size() != std::string(prefix).size() + 1) continue;
    const int k = name.back() - '0';
    const int least = level == RejectionOption::kSeqMax ? 2 : 1;
    if (k >= least && k <= 3) return {name, level, k, 0, 0};
  }
  throw BadConfig(
      "rollout_correction.rollout_rs has '{}'; allowed: token_k1 to k3, seq_sum_k1 to k3, seq_mean_k1 to k3, "
      "seq_max_k2, seq_max_k3, joined by commas",
      name);
}

}  // namespace

Threshold importance_threshold(const std::string& text) {
  return threshold(trimmed(text), "rollout_is_threshold");
}

std::vector<RejectionOption> rejection_options(const std::string& options, const std::string& thresholds) {
  std::vector<RejectionOption> out;
  for (const std::string& name : split(options)) {
    const auto same = [&](const RejectionOption& o) { return o.name == name; };
    if (std::none_of(out.begin(), out.end(), same)) out.push_back(option(name));
  }
  const std::vector<std::string> given = split(thresholds);
  if (out.empty()) throw BadConfig("rollout_correction.rollout_rs = '{}' names no option", options);
  if (given.size() != 1 && given.size() != out.size()) {
    throw BadConfig(
        "rollout_correction.rollout_rs_threshold = '{}'; allowed: one for all, or one for each of {}",
        thresholds, out.size());
  }
  for (size_t i = 0; i < out.size(); ++i) {
    const std::string& text = given[given.size() == 1 ? 0 : i];
    const Threshold bound = threshold(text, "rollout_rs_threshold");
    if (out[i].k == 1) {
      out[i].upper = std::log(bound.upper);
      out[i].lower = std::log(bound.lower.value_or(1 / bound.upper));
      if (out[i].lower > out[i].upper) {
        throw BadConfig(
            "rollout_correction.rollout_rs_threshold = '{}'; allowed for {}: lo_hi, or a number >= 1", text,
            out[i].name);
      }
    } else {
      if (bound.lower) {
        throw BadConfig("rollout_correction.rollout_rs_threshold = '{}'; allowed for {}: one number > 0",
                        text, out[i].name);
      }
      out[i].upper = bound.upper;
    }
  }
  return out;
}

void RolloutCorrectionConfig::check() const {
  if (!rollout_is.empty() && rollout_is != "token" && rollout_is != "sequence") {
    throw BadConfig("rollout_correction.rollout_is = '{}'; allowed: token, sequence, or empty", rollout_is);
  }
  if (!rollout_is.empty()) importance_threshold(rollout_is_threshold);
  if (!rollout_rs.empty()) rejection_options(rollout_rs, rollout_rs_threshold);
  if (loss_type != "ppo_clip" && loss_type != "reinforce") {
    throw BadConfig("rollout_correction.loss_type = '{}'; allowed: ppo_clip, reinforce", loss_type);
  }
}

}  // namespace titanium
