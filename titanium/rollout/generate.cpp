#include "titanium/rollout/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// Sequences side by side: the new tokens of each, and the slot of the cache where each goes on.
struct Feed {
  std::vector<int64_t> slots;
  std::vector<std::vector<int64_t>> tokens;  // [slots]
};

// The logits after the last token of every sequence: [slots, V] fp32.
at::Tensor next_logits(const Model& model, at::ScalarType compute, KvCache& cache, const Feed& feed) {
  PackedBatch batch;
  batch.bounds = {0};
  std::vector<int64_t> last;
  for (size_t i = 0; i < feed.slots.size(); ++i) {
    const int64_t begin = cache.length(feed.slots[i]);
    for (size_t t = 0; t < feed.tokens[i].size(); ++t) {
      batch.tokens.push_back(feed.tokens[i][t]);
      batch.positions.push_back(begin + static_cast<int64_t>(t));
    }
    batch.bounds.push_back(batch.size());
    last.push_back(batch.size() - 1);
  }
  batch.labels.assign(batch.tokens.size(), kNoLabel);
  BlockInput in = block_input(model, batch, compute, HeadRows::kAll);
  in.cache = &cache;
  in.slots = feed.slots;
  BlockOutput out;
  at::Tensor x = at::empty({0}, at::TensorOptions().dtype(compute));
  for (const auto& block : model.blocks) {
    if (block.get() != model.head) x = block->forward(x, in, out);
  }
  for (size_t i = 0; i < feed.slots.size(); ++i) {
    cache.advance(feed.slots[i], static_cast<int64_t>(feed.tokens[i].size()));
  }
  return model.head->logits(x.index_select(0, at::tensor(at::ArrayRef<int64_t>(last), at::kLong)))
      .to(at::kFloat);
}

}  // namespace

std::vector<Generated> generate(const Model& model, ParamStore& store,
                                const std::vector<std::vector<int64_t>>& prompts,
                                const SamplingOptions& options, const OnToken& on_token) {
  options.check();
  const ParallelDims& dims = store.mesh().dims();
  if (dims.tp > 1 || dims.pp > 1) {
    throw BadConfig(
        "generate: a rank has a part of the model (tensor_parallel_degree {}, pipeline_parallel_degree {}): "
        "allowed: 1 of each",
        dims.tp, dims.pp);
  }
  if (prompts.empty()) throw BadData("generate: no prompt was given");
  int64_t longest = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (prompts[i].empty()) throw BadData("generate: prompt {} has no token", i);
    longest = std::max(longest, static_cast<int64_t>(prompts[i].size()));
  }
  const at::NoGradGuard no_grad;
  for (const auto& unit : store.units()) unit->unshard();
  const at::ScalarType compute = store.dtypes().compute;
  const auto& c = model.config;
  KvCache cache(c.num_hidden_layers, static_cast<int64_t>(prompts.size()), longest + options.max_new_tokens,
                c.num_key_value_heads, c.head_dim, compute);

  std::vector<Generated> results(prompts.size());
  Feed feed{{}, prompts};
  feed.slots.resize(prompts.size());
  std::iota(feed.slots.begin(), feed.slots.end(), 0);
  while (!feed.slots.empty()) {
    const at::Tensor logits = next_logits(model, compute, cache, feed).contiguous();  // [slots, V]
    Feed next;
    for (size_t i = 0; i < feed.slots.size(); ++i) {
      const int64_t slot = feed.slots[i];
      Generated& result = results[slot];
      const Random random(options.seed, Purpose::kSample, static_cast<uint64_t>(slot));
      const int64_t id = choose_token(logits.data_ptr<float>() + static_cast<int64_t>(i) * logits.size(1),
                                      logits.size(1), options, random.uniform(result.ids.size()));
      result.ids.push_back(id);
      if (on_token) on_token(static_cast<size_t>(slot), id);
      result.stopped =
          std::find(options.stop_ids.begin(), options.stop_ids.end(), id) != options.stop_ids.end();
      if (result.stopped || static_cast<int64_t>(result.ids.size()) == options.max_new_tokens) continue;
      next.slots.push_back(slot);
      next.tokens.push_back({id});
    }
    feed = std::move(next);
  }
  for (const auto& unit : store.units()) unit->reshard(/*keep_memory=*/unit->whole());
  return results;
}

}  // namespace titanium
