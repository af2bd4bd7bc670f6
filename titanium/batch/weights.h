// The one place where a mean becomes a sum (design D4).  The objective is one number for the whole global
// batch:
//   sum over samples, over positions t, of weight[t] * loss[t].
// Weights come from counts of the whole global batch and are made before it is cut into micro-batches, so no
// cut can change the objective.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "titanium/batch/sample.h"

namespace titanium {

// How token losses become one number; verl's names.  m = trained tokens of a sequence, M = of the global
// batch, R = sequences with m > 0, S = scale factor:
enum class Averaging {
  kTokenMean,            // token-mean                weight 1 / M
  kSeqMeanTokenSum,      // seq-mean-token-sum        weight 1 / R
  kSeqMeanTokenMean,     // seq-mean-token-mean       weight 1 / (R m)
  kSeqMeanTokenSumNorm,  // seq-mean-token-sum-norm   weight 1 / (R S)
  kTokenSum,             // token-sum                 weight 1
};
const char* name(Averaging mode);                 // "token-mean", ...
Averaging averaging_from(std::string_view name);  // BadConfig lists the allowed names

// Add those of all data ranks before weighing.
struct Counts {
  int64_t tokens = 0;     // M: trained tokens that some position predicts
  int64_t sequences = 0;  // R: sequences with at least one of them
  int64_t untrained = 0;  // sequences with none; they get weight 0 and take no part in any mean
  Counts& operator+=(const Counts& other);
  bool operator==(const Counts&) const = default;
};
Counts count(std::span<const Sample> samples);

// The weights of a sample, [n], at the predicting positions: weight[t] belongs to the label ids[t + 1], so
// weight[n - 1] is 0.  All 0 (never NaN) for a sample, or a global batch, without a trained token.
// scale_factor is used by kSeqMeanTokenSumNorm alone, where it must be finite and > 0 (BadConfig): it is a
// number of the run, never the width of a batch.
std::vector<double> weigh(const Sample& sample, Averaging mode, const Counts& counts,
                          double scale_factor = 0);

// Weight of a sample in an objective of whole sequences: 1 / R, or 0 where it has no trained token.
double sequence_weight(const Sample& sample, const Counts& counts);

// Weight of a sample in a mean over all samples, trained or not: 1 / (R + untrained).
double row_weight(const Counts& counts);

struct WeighedSample {
  Sample sample;
  std::vector<double> weight;  // [n]
  double seq_weight = 0;
  double row_weight = 0;
};
std::vector<WeighedSample> weigh_all(std::vector<Sample> samples, Averaging mode, const Counts& counts,
                                     double scale_factor = 0);

}  // namespace titanium
