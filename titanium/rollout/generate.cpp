#include "titanium/rollout/generate.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <exception>
#include <tuple>

#include "titanium/base/error.h"
#include "titanium/ops/linear_logprob.h"

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

// Weights gathered, and packed where that pays, while this lives.
class Gathered {
 public:
  explicit Gathered(ParamStore& store) : store_(store) {
    for (const auto& unit : store.units()) {
      unit->unshard();
      unit->keep_packed(true);
    }
  }
  ~Gathered() {
    for (const auto& unit : store_.units()) {
      unit->keep_packed(false);
      if (std::uncaught_exceptions() > exceptions_) {
        unit->abandon();
      } else {
        unit->reshard(/*keep_memory=*/unit->whole());
      }
    }
  }
  Gathered(const Gathered&) = delete;
  Gathered& operator=(const Gathered&) = delete;

 private:
  ParamStore& store_;
  int exceptions_ = std::uncaught_exceptions();
};

// Which prompts are in the cache, and where.
class Places {
 public:
  Places(const std::vector<std::vector<int64_t>>& prompts, KvCache& cache, int64_t slots)
      : prompts_(prompts), cache_(cache), prompt_of_(slots, -1) {
    for (int64_t slot = slots; slot-- > 0;) free_.push_back(slot);
  }

  void leave(int64_t slot) {
    free_.push_back(slot);
  }  // the cache keeps what it holds until the place is taken

  // Gives free places to the prompts that wait, in order, and adds what each has yet to compute.
  void fill(Feed* feed) {
    std::vector<int64_t> fresh;  // slots whose prompts this feed computes
    while (next_ < static_cast<int64_t>(prompts_.size()) && !free_.empty()) {
      const std::vector<int64_t>& prompt = prompts_[next_];
      int64_t donor = -1, shared = 0, soon = 0;
      for (int64_t slot = 0; slot < static_cast<int64_t>(prompt_of_.size()); ++slot) {
        if (prompt_of_[slot] < 0) continue;
        const int64_t n = in_common(prompts_[prompt_of_[slot]], prompt),
                      held = std::min(n, cache_.length(slot));
        if (std::find(fresh.begin(), fresh.end(), slot) != fresh.end()) soon = std::max(soon, n);
        if (held > shared) std::tie(donor, shared) = std::pair(slot, held);
      }
      if (soon >= shared + kWorthWaiting) return;  // the next step has it
      const int64_t slot = free_.back();
      free_.pop_back();
      if (donor == slot) {
        cache_.truncate(slot, shared);
      } else if (shared > 0) {
        cache_.copy(donor, slot, shared);
      } else {
        cache_.truncate(slot, 0);
      }
      prompt_of_[slot] = next_++;
      fresh.push_back(slot);
      feed->slots.push_back(slot);
      feed->tokens.emplace_back(prompt.begin() + shared, prompt.end());
    }
  }

  int64_t prompt_of(int64_t slot) const { return prompt_of_[slot]; }

 private:
  static constexpr int64_t kWorthWaiting = 32;  // tokens

  // Tokens at the start, all but the last of `b` at most: that one gives the first logits.
  static int64_t in_common(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
    const auto n =
        static_cast<int64_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).second - b.begin());
    return std::min(n, static_cast<int64_t>(b.size()) - 1);
  }

  const std::vector<std::vector<int64_t>>& prompts_;
  KvCache& cache_;
  std::vector<int64_t> prompt_of_, free_;  // by slot; -1: none yet
  int64_t next_ = 0;
};

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
  const Gathered gathered(store);
  const at::ScalarType compute = store.dtypes().compute;
  const auto& c = model.config;
  const auto count = static_cast<int64_t>(prompts.size());
  const int64_t slots = options.max_sequences > 0 ? std::min(options.max_sequences, count) : count;
  KvCache cache(c.num_hidden_layers, slots, longest + options.max_new_tokens, c.num_key_value_heads,
                c.head_dim, compute);
  Places places(prompts, cache, slots);

  std::vector<Generated> results(prompts.size());
  const float temperature = options.temperature > 0 ? static_cast<float>(options.temperature) : 1;
  Feed feed;
  places.fill(&feed);
  while (!feed.slots.empty()) {
    const at::Tensor logits = next_logits(model, compute, cache, feed).contiguous();  // [slots, V]
    const int64_t V = logits.size(1);
    Feed next;
    for (size_t i = 0; i < feed.slots.size(); ++i) {
      const int64_t slot = feed.slots[i], prompt = places.prompt_of(slot);
      Generated& result = results[prompt];
      const Random random(options.seed, Purpose::kSample, static_cast<uint64_t>(prompt));
      const float* row = logits.const_data_ptr<float>() + static_cast<int64_t>(i) * V;
      const int64_t id = choose_token(row, V, options, random.uniform(result.ids.size()));
      result.ids.push_back(id);
      if (options.logprobs) result.logprobs.push_back(logprob_of_row(row, V, id, temperature));
      if (on_token) on_token(static_cast<size_t>(prompt), id);
      result.stopped =
          std::find(options.stop_ids.begin(), options.stop_ids.end(), id) != options.stop_ids.end();
      if (result.stopped || static_cast<int64_t>(result.ids.size()) == options.max_new_tokens) {
        places.leave(slot);
        continue;
      }
      next.slots.push_back(slot);
      next.tokens.push_back({id});
    }
    places.fill(&next);
    feed = std::move(next);
  }
  return results;
}

}  // namespace titanium
