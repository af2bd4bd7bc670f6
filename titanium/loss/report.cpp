#include "titanium/loss/report.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "titanium/base/error.h"

namespace titanium {
namespace {

template <typename T>
void put(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}
template <typename T>
T take(std::string_view& bytes) {
  T value;
  if (bytes.size() < sizeof value) throw Bug("reports of another rank end too early");
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}

}  // namespace

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

std::string to_bytes(const Reports& reports) {
  std::string out;
  for (const auto& [name, report] : reports) {
    put(out, name.size());
    out += name;
    put(out, report.sum);
    put(out, report.count);
    put(out, static_cast<int>(report.op));
    put(out, report.spread);
  }
  return out;
}

Reports reports_from(std::string_view bytes) {
  Reports reports;
  while (!bytes.empty()) {
    const auto size = take<size_t>(bytes);
    if (size > bytes.size()) throw Bug("reports of another rank end too early");
    const std::string name(bytes.substr(0, size));
    bytes.remove_prefix(size);
    Report& report = reports[name];
    report.sum = take<double>(bytes);
    report.count = take<double>(bytes);
    report.op = static_cast<Report::Op>(take<int>(bytes));
    report.spread = take<double>(bytes);
  }
  return reports;
}

}  // namespace titanium
