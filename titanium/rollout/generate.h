// Decoding with a KV cache, on the blocks that train.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "titanium/models/kv_cache.h"
#include "titanium/models/model.h"
#include "titanium/rollout/sampling.h"
#include "titanium/shard/param_store.h"

namespace titanium {

struct Generated {
  std::vector<int64_t> ids;     // new tokens, a stop token included
  std::vector<float> logprobs;  // where the options want them: of each, by softmax(logits / temperature)
                                // (greedy: temperature 1) before top-k and top-p
  bool stopped = false;  // by a stop token; else by max_new_tokens
};

// Called for every new token, as soon as it is known.
using OnToken = std::function<void(size_t prompt, int64_t id)>;

// Continuous batching: a sequence that ends leaves its place in the batch to the next prompt.  What prompts
// have in common at their start is computed once, as for several samples of one prompt (give it several
// times).  The draws of prompt i are a function of (seed, i, position) alone: batching does not change them.
// In bf16 the log-probs are those of a scoring pass over the same tokens, to the bit.  Matrices stay packed
// until the weights are written or released (see Unit::keep_packed).  BadData: no prompt, an empty one, or
// an id outside the vocabulary.  BadConfig: tensor or pipeline ranks, each of which has a part of the model
// alone.
std::vector<Generated> generate(const Model& model, ParamStore& store,
                                const std::vector<std::vector<int64_t>>& prompts,
                                const SamplingOptions& options, const OnToken& on_token = nullptr);

}  // namespace titanium
