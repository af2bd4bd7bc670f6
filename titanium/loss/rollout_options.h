// The texts that configure a rollout correction.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace titanium {

struct Threshold {
  double upper = 0;
  std::optional<double> lower;  // of "lo_hi"
};
// BadConfig names the key rollout_correction.rollout_is_threshold.
Threshold importance_threshold(const std::string& text);

struct RejectionOption {
  std::string name;  // seq_mean_k1, ...
  enum Level { kToken, kSeqSum, kSeqMean, kSeqMax } level = kToken;
  int k = 1;
  double upper = 0, lower = 0;  // of the statistic itself; lower for k1 alone
};
// BadConfig names the key rollout_correction.rollout_rs or rollout_rs_threshold.
std::vector<RejectionOption> rejection_options(const std::string& options, const std::string& thresholds);

}  // namespace titanium
