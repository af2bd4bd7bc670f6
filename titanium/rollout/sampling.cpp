#include "titanium/rollout/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "titanium/base/error.h"

namespace titanium {

void SamplingOptions::check() const {
  if (!(temperature >= 0) || std::isinf(temperature)) {
    throw BadConfig("temperature = {}: must be 0 (greedy) or a positive number", temperature);
  }
  if (top_k < 0) throw BadConfig("top_k = {}: must be 0 (all tokens) or positive", top_k);
  if (!(top_p > 0 && top_p <= 1)) throw BadConfig("top_p = {}: must be in (0, 1]", top_p);
  if (max_sequences < 0)
    throw BadConfig("max_sequences = {}: must be 0 (all prompts at once) or positive", max_sequences);
  if (max_new_tokens < 1) throw BadConfig("max_new_tokens = {}: must be at least 1", max_new_tokens);
}

int64_t choose_token(const float* logits, int64_t V, const SamplingOptions& options, double uniform) {
  int64_t best = 0;
  for (int64_t v = 0; v < V; ++v) {
    if (std::isnan(logits[v])) throw BadData("sampling: logit {} is not a number", v);
    if (logits[v] > logits[best]) best = v;
  }
  if (options.temperature == 0) return best;

  const double top = logits[best];
  const auto weight = [&](int64_t v) { return std::exp((logits[v] - top) / options.temperature); };
  const auto before = [&](int64_t a, int64_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  std::vector<int64_t> kept(static_cast<size_t>(V));
  std::iota(kept.begin(), kept.end(), 0);
  if (options.top_k > 0 && options.top_k < V) {
    std::nth_element(kept.begin(), kept.begin() + options.top_k - 1, kept.end(), before);
    kept.resize(static_cast<size_t>(options.top_k));
  }
  if (options.top_k > 0 || options.top_p < 1) std::sort(kept.begin(), kept.end(), before);
  double total = 0;
  for (int64_t v : kept) total += weight(v);
  if (options.top_p < 1) {
    double reached = 0;
    size_t count = 0;
    while (count < kept.size() && reached < options.top_p * total) reached += weight(kept[count++]);
    kept.resize(std::max<size_t>(count, 1));
    total = reached;
  }
  double left = uniform * total;
  for (int64_t v : kept) {
    left -= weight(v);
    if (left < 0) return v;
  }
  return kept.back();  // rounding
}

}  // namespace titanium
