// The tokens of a micro-batch as a loss sees them: plain arrays in double, documents end to end.  No torch.
//
// T positions; entry t of an array belongs to labels[t].  D documents that are samples, in
// [bounds[d], bounds[d + 1]); behind them there may be a filler.  Where the mask is 0 a loss neither reads
// nor writes, so that whatever stands there, inf and nan too, has no part in values or gradients.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace titanium {

using Column = std::vector<double>;  // [T]

struct Rows {
  std::vector<int64_t> bounds{0};  // [D + 1]
  std::vector<uint8_t> mask;       // [T]

  int64_t documents() const { return static_cast<int64_t>(bounds.size()) - 1; }
  size_t tokens() const { return mask.size(); }
  int64_t trained(int64_t document) const;  // n_b, the masked-in tokens of a document
  int64_t trained() const;                  // N, of all

  // visit(t) for every masked-in token of a document, or of all.
  template <typename Visit>
  void each(int64_t document, const Visit& visit) const {
    const auto d = static_cast<size_t>(document);
    for (auto t = static_cast<size_t>(bounds[d]); t < static_cast<size_t>(bounds[d + 1]); ++t) {
      if (mask[t]) visit(t);
    }
  }
  template <typename Visit>
  void each(const Visit& visit) const {
    for (int64_t d = 0; d < documents(); ++d) each(d, visit);
  }
};

// Sum of values(t) over the masked-in tokens of a document.
template <typename Values>
double sum(const Rows& rows, int64_t document, const Values& values) {
  double total = 0;
  rows.each(document, [&](size_t t) { total += values(t); });
  return total;
}

// mean_m: over all masked-in tokens; of nothing 0.
template <typename Values>
double mean(const Rows& rows, const Values& values) {
  double total = 0;
  int64_t n = 0;
  rows.each([&](size_t t) {
    total += values(t);
    ++n;
  });
  return n > 0 ? total / static_cast<double>(n) : 0;
}

}  // namespace titanium
