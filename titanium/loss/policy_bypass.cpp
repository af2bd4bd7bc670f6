// The rollout's log-probs take the place of the old policy's: no pass over the batch before the update.
#include "titanium/loss/policy_math.h"

namespace titanium {

PolicyTerm bypass_mode(const PolicyInput& in, const PolicyLossConfig& config) {
  RolloutCorrection correction =
      rollout_correction(in.rows, in.logprob, in.old_logprob, config.rollout_correction);
  PolicyInput kept = in;
  kept.rows.mask = std::move(correction.mask);
  kept.rollout_weight.clear();
  PolicyTerm term;
  if (config.rollout_correction.loss_type == "ppo_clip") {
    term = vanilla(kept, config);  // its ratio is the importance weight already
  } else {
    kept.rollout_weight = std::move(correction.weights);
    term = gpg(kept, config);
    term.reports["actor/ppo_kl"] = ppo_kl(kept, false);
  }
  add_reports(term.reports, correction.reports);
  return term;
}

}  // namespace titanium
