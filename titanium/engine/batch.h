// What a trainer hands to the engine, and what it gets back.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "titanium/batch/partition.h"
#include "titanium/batch/sample.h"
#include "titanium/batch/weights.h"
#include "titanium/loss/token_stats.h"

namespace titanium {

// Rows of different lengths, end to end: row i is values[offsets[i], offsets[i + 1]).
struct Jagged {
  at::Tensor values;                // [offsets.back()]
  std::vector<int64_t> offsets{0};  // [rows + 1]
  int64_t rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
  at::Tensor row(int64_t i) const {
    return values.narrow(0, offsets.at(i), offsets.at(i + 1) - offsets.at(i));
  }
};

// How the sequences of a call become micro-batches; at most one of the three is set (BadConfig).  None: as
// the engine's config says (use_dynamic_bsz and the keys beside it).  The result does not depend on it
// (design D5), memory does.
struct MicroBatching {
  Groups given;           // indices into EngineBatch::samples, each sample once, in the order they are packed
  int64_t sequences = 0;  // verl: micro_batch_size_per_gpu; consecutive samples, must divide their number
  int64_t max_tokens = 0;     // verl: max_token_len_per_gpu with use_dynamic_bsz; never exceeded
  int64_t count_divisor = 1;  // with max_tokens: the number of micro-batches is a multiple of it
};

struct EngineBatch {
  // Of this data rank.  ids, loss_mask, temperature, columns, seq_columns and group are read; index is set by
  // the engine to the place in this list.
  std::vector<Sample> samples;
  std::optional<double> temperature;  // of all samples, in place of their own
  MicroBatching micro;
  bool calculate_entropy = false;
  bool calculate_sum_pi_squared = false;
  bool return_model_output = false;  // in training; without it statistics are dropped
  std::optional<Counts> counts;      // of the whole global batch; empty: counted here and over the data ranks
};

struct EngineOutput {
  // "log_probs" and, as asked, "entropy", "sum_pi_squared" of a language model, "values" of a value model, in
  // fp32 (fp64 in an fp64 run), rows and lengths as the samples.  Entry t of a row belongs to token t + 1
  // given the tokens up to t (verl's alignment).  The last entry of a row is 0, but that of values: the value
  // after the last token.
  std::map<std::string, Jagged> model_output;
  std::vector<double> loss;  // one a micro-batch of this data rank; the sum over all is the objective
  std::map<std::string, Report> metrics;  // of the whole batch of all data ranks, whatever its split
};

}  // namespace titanium
