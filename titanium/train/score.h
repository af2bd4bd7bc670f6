// Log-probs and entropies of given tokens.
#pragma once
#include <vector>

#include "titanium/batch/sample.h"
#include "titanium/train/step.h"

namespace titanium {

// Entry i belongs to token i: its log-probability given the tokens before it, and the entropy (nats) of the
// distribution that it was drawn from.  The first token of a sequence is given, not predicted: both are 0
// there.
struct TokenScores {
  std::vector<double> logprob, entropy;  // [n]
};

// Samples are packed to the budget; results come in their order.  On many ranks all give the same samples,
// each data rank scores a part of them, and all get all results.  BadData: a sample longer than `max_tokens`,
// whose config key is `max_tokens_key`.
std::vector<TokenScores> score_samples(TrainStep& step, const std::vector<Sample>& samples,
                                       int64_t max_tokens, const std::string& max_tokens_key);

}  // namespace titanium
