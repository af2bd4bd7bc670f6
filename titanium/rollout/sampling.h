// From logits to a token.
#pragma once
#include <cstdint>
#include <vector>

#include "titanium/base/random.h"

namespace titanium {

struct SamplingOptions {
  double temperature = 0;  // 0: greedy
  int64_t top_k = 0;       // 0: all
  double top_p = 1;        // smallest set of tokens whose probability reaches it
  uint64_t seed = 0;
  int64_t max_new_tokens = 128;
  int64_t max_sequences = 0;      // decoded at once, the next prompt as soon as one ends; 0: all
  bool logprobs = false;          // of the tokens drawn: a pass over the vocabulary for each
  std::vector<int64_t> stop_ids;  // a token of these ends the sequence, and is its last

  void check() const;  // BadConfig names the option, what was given and what is allowed
};

// Greedy: the largest logit, the lowest id among equals.  Else: softmax(logits / temperature) over the top_k
// largest, cut to top_p, drawn with `uniform` in [0, 1).  BadData when a logit is NaN.
int64_t choose_token(const float* logits, int64_t V, const SamplingOptions& options, double uniform);

}  // namespace titanium
