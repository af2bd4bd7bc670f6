// Metrics that add up: over micro-batches, then over data ranks.  The result is the same for every split.
#pragma once
#include <map>
#include <string>
#include <string_view>

namespace titanium {

struct Report {
  enum Op {
    kMean,  // of `count` numbers
    kSum,
    kMax,  // of `count` numbers, held in sum
    kMin,
    kStd,         // deviation of `count` numbers, n form
    kSampleStd,   // n - 1 form; 0 of one number
    kSampleSize,  // effective sample size of weights, as a share: mean^2 / mean of squares
  };
  double sum = 0;
  double count = 0;
  Op op = kMean;
  double spread = 0;  // of the last three: sum of (x - mean)^2

  static Report mean(double sum, double count) { return {sum, count, kMean}; }
  static Report total(double sum) { return {sum, 1, kSum}; }
  static Report of(Op op) { return {0, 0, op}; }  // of nothing yet

  void add(double x) { *this += {x, 1, op}; }  // one more number
  double value() const;                        // of nothing 0, so that a metric is always finite
  Report& operator+=(const Report& other);     // Bug: another op
};

using Reports = std::map<std::string, Report>;
void add_reports(Reports& to, const Reports& from);

// For another rank of the run: every bit of every number.
std::string to_bytes(const Reports& reports);
Reports reports_from(std::string_view bytes);  // Bug for what to_bytes does not write

}  // namespace titanium
