#include "titanium/loss/report.h"

#include <algorithm>

#include "titanium/base/error.h"

namespace titanium {

double Report::value() const {
  if (op == kSum) return sum;
  if (count == 0) return 0;
  switch (op) {
    case kMean:
      return sum / count;
    case kStd: {
      const double mean = sum / count;
      return std::sqrt(std::max(squares / count - mean * mean, 0.0));
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
  switch (op) {
    case kMean:
    case kSum:
    case kStd:
      sum += other.sum;
      squares += other.squares;
      break;
    case kMax:
      if (other.count > 0) sum = count > 0 ? std::max(sum, other.sum) : other.sum;
      break;
    case kMin:
      if (other.count > 0) sum = count > 0 ? std::min(sum, other.sum) : other.sum;
      break;
  }
  count += other.count;
  return *this;
}

void add_reports(Reports& to, const Reports& from) {
  for (const auto& [name, report] : from) {
    const auto [entry, is_new] = to.emplace(name, report);
    if (!is_new) entry->second += report;
  }
}

}  // namespace titanium
