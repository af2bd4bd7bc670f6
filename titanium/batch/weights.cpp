#include "titanium/batch/weights.h"

#include <cmath>
#include <string>
#include <utility>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr std::pair<Averaging, const char*> kNames[] = {
    {Averaging::kTokenMean, "token-mean"},
    {Averaging::kSeqMeanTokenSum, "seq-mean-token-sum"},
    {Averaging::kSeqMeanTokenMean, "seq-mean-token-mean"},
    {Averaging::kSeqMeanTokenSumNorm, "seq-mean-token-sum-norm"},
    {Averaging::kTokenSum, "token-sum"},
};

}  // namespace

const char* name(Averaging mode) {
  for (const auto& [value, text] : kNames) {
    if (value == mode) return text;
  }
  throw Bug("no such averaging mode: {}", static_cast<int>(mode));
}

Averaging averaging_from(std::string_view name) {
  std::string allowed;
  for (const auto& [value, text] : kNames) {
    if (name == text) return value;
    allowed += (allowed.empty() ? "" : ", ") + std::string(text);
  }
  throw BadConfig("'{}' is not an averaging mode; allowed: {}", name, allowed);
}

int64_t trained_tokens(const Sample& sample) {
  if (sample.ids.size() != sample.loss_mask.size()) {
    throw BadData("sample {}: {} ids but a loss mask of {}", sample.index, sample.ids.size(),
                  sample.loss_mask.size());
  }
  int64_t trained = 0;
  for (size_t i = 1; i < sample.loss_mask.size(); ++i) trained += sample.loss_mask[i] != 0;
  return trained;
}

Counts& Counts::operator+=(const Counts& other) {
  tokens += other.tokens;
  sequences += other.sequences;
  untrained += other.untrained;
  return *this;
}

Counts count(std::span<const Sample> samples) {
  Counts counts;
  for (const Sample& sample : samples) {
    const int64_t trained = trained_tokens(sample);
    counts.tokens += trained;
    ++(trained > 0 ? counts.sequences : counts.untrained);
  }
  return counts;
}

std::vector<double> weigh(const Sample& sample, Averaging mode, const Counts& counts, double scale_factor) {
  if (mode == Averaging::kSeqMeanTokenSumNorm && !(std::isfinite(scale_factor) && scale_factor > 0)) {
    throw BadConfig("seq-mean-token-sum-norm needs a finite scale factor > 0, got {}", scale_factor);
  }
  const int64_t trained = trained_tokens(sample);
  std::vector<double> weight(sample.ids.size(), 0.0);
  if (trained == 0) return weight;
  if (counts.tokens < trained || counts.sequences < 1) {
    throw Bug("sample {} has {} trained tokens, more than the {} counted in the global batch", sample.index,
              trained, counts.tokens);
  }
  const double sequences = static_cast<double>(counts.sequences);
  double each = 0;
  switch (mode) {
    case Averaging::kTokenMean:
      each = 1 / static_cast<double>(counts.tokens);
      break;
    case Averaging::kSeqMeanTokenSum:
      each = 1 / sequences;
      break;
    case Averaging::kSeqMeanTokenMean:
      each = 1 / (sequences * static_cast<double>(trained));
      break;
    case Averaging::kSeqMeanTokenSumNorm:
      each = 1 / (sequences * scale_factor);
      break;
    case Averaging::kTokenSum:
      each = 1;
      break;
  }
  for (size_t i = 1; i < weight.size(); ++i) {
    if (sample.loss_mask[i] != 0) weight[i - 1] = each;
  }
  return weight;
}

double sequence_weight(const Sample& sample, const Counts& counts) {
  if (trained_tokens(sample) == 0) return 0;
  if (counts.sequences < 1) throw Bug("sample {} is not in the counts of the global batch", sample.index);
  return 1 / static_cast<double>(counts.sequences);
}

double row_weight(const Counts& counts) {
  const int64_t rows = counts.sequences + counts.untrained;
  if (rows < 1) throw Bug("a sample is not in the counts of the global batch");
  return 1 / static_cast<double>(rows);
}

std::vector<WeighedSample> weigh_all(std::vector<Sample> samples, Averaging mode, const Counts& counts,
                                     double scale_factor) {
  std::vector<WeighedSample> out;
  out.reserve(samples.size());
  for (Sample& sample : samples) {
    std::vector<double> weight = weigh(sample, mode, counts, scale_factor);
    const double seq_weight = sequence_weight(sample, counts);
    out.push_back({std::move(sample), std::move(weight), seq_weight, row_weight(counts)});
  }
  return out;
}

}  // namespace titanium
