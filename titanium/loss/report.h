// Metrics that add up: over micro-batches, then over data ranks.  The result is the same for every split.
#pragma once
#include <cmath>
#include <map>
#include <string>

namespace titanium {

struct Report {
  enum Op {
    kMean,  // sum / count, 0 of nothing
    kSum,   // sum
    kMax,   // the largest of `count` numbers, held in sum; 0 of nothing
    kMin,
    kStd,  // root of squares / count - (sum / count)^2: the deviation of `count` numbers, n form
  };
  double sum = 0;
  double count = 0;
  Op op = kMean;
  double squares = 0;  // of kStd

  static Report mean(double sum, double count) { return {sum, count, kMean}; }
  static Report total(double sum) { return {sum, 1, kSum}; }
  static Report max(double value, double count = 1) { return {value, count, kMax}; }
  static Report min(double value, double count = 1) { return {value, count, kMin}; }

  double value() const;
  // Bug: another op.
  Report& operator+=(const Report& other);
};

using Reports = std::map<std::string, Report>;
void add_reports(Reports& to, const Reports& from);

}  // namespace titanium
