// What a forward works on: documents laid end to end, without padding between them.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace titanium {

constexpr int64_t kNoLabel = -1;

// T tokens of D documents.  Position t predicts labels[t]; the last token of a document predicts nothing.
struct PackedBatch {
  std::vector<int64_t> tokens;      // [T]
  std::vector<int64_t> positions;   // [T], restart at 0 in every document
  std::vector<int64_t> bounds;      // [D + 1], first token of each document, then T
  std::vector<int64_t> labels;      // [T], next token of the same document, or kNoLabel
  std::vector<double> temperature;  // [T], or empty for 1
  std::vector<double> weight;  // [T], weight of labels[t] in the objective; 0 where there is no label.  Holds
                               // every mean (design D4): after it, losses are sums.
  std::vector<double> seq_weight;  // [D], weight of a document in sequence-level objectives, or empty
  std::vector<double>
      row_weight;               // [D], the same where documents without a trained token count too, or empty
  std::vector<int64_t> sample;  // [D], which sample of the global batch a document is (its index in the step)
  int64_t first_sample = 0;     // number in the global batch of the sample whose index here is 0
  int64_t update = 0;           // updates made before this one: a loss that draws draws anew
  std::vector<int64_t> group;   // [D], of its sample, -1 = none; or empty
  // Sample::columns, shifted by one in each document: entry t of [T] belongs to labels[t], 0 at the last.
  std::map<std::string, std::vector<double>> columns;
  std::map<std::string, std::vector<double>> seq_columns;  // [D], 0 for a filler
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  int64_t documents() const { return static_cast<int64_t>(bounds.size()) - 1; }
};

}  // namespace titanium
