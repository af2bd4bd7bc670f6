#include "titanium/config/nearest.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace titanium {

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replace});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

std::string nearest(std::string_view given, std::span<const std::string> names) {
  constexpr size_t kLongest = 100;  // nobody means a key by a longer word
  if (given.size() > kLongest) return {};
  std::string best;
  int best_distance = 0;
  for (const std::string& name : names) {
    const int distance = edit_distance(given, name);
    const bool prefix = given.size() >= 3 && (name.starts_with(given) || given.starts_with(name));
    const int allowed = std::max<int>(2, static_cast<int>(name.size()) / 3);
    if ((distance <= allowed || prefix) && (best.empty() || distance < best_distance)) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace titanium
