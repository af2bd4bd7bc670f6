#include "titanium/loss/report.h"

#include <algorithm>
#include <cmath>

#include "titanium/base/error.h"

namespace titanium {

double Report::value() const {
  if (op == kSum) return sum;
  if (count == 0) return 0;
  switch (op) {
    case kMean:
      return sum / count;
    case kStd:
      return std::sqrt(spread / count);
    case kSampleStd:
      return count > 1 ? std::sqrt(spread / (count - 1)) : 0;
    case kSampleSize: {
      const double mean = sum / count, squares = spread / count + mean * mean;
      return squares > 0 ? (mean + 1e-8) * (mean + 1e-8) / squares : 0;  // verl's epsilon
    }
    default:
      return sum;
  }
}

Report& Report::operator+=(const Report& other) {
  if (op != other.op) {
    throw Bug("a report is added up in two ways: {} and {}", static_cast<int>(op),
              static_cast<int>(other.op));
  }
  if (other.count == 0) return *this;
  if (count == 0) return *this = other;
  switch (op) {
    case kMax:
      sum = std::max(sum, other.sum);
      break;
    case kMin:
      sum = std::min(sum, other.sum);
      break;
    case kMean:
    case kSum:
      sum += other.sum;
      break;
    default: {
      // Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
      // 1979.
      const double apart = other.sum / other.count - sum / count;
      spread += other.spread + apart * apart * count * other.count / (count + other.count);
      sum += other.sum;
    }
  }
  count += other.count;
  return *this;
}

void add_reports(Reports& to, const Reports& from) {
  for (const auto& [name, report] : from) {
    const auto [entry, is_new] = to.emplace(name, report);
    if (is_new) continue;
    if (entry->second.op != report.op)  // those of a loss of the caller's own: built-in ones have one each
      throw BadData(
          "metric '{}' is added up in one way by a micro-batch and in another by the next: one op a metric",
          name);
    entry->second += report;
  }
}

}  // namespace titanium
