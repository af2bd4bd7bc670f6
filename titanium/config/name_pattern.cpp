#include "titanium/config/name_pattern.h"

#include <algorithm>

#include "titanium/base/error.h"
#include "titanium/config/nearest.h"

namespace titanium {

bool matches_pattern(std::string_view pattern, std::string_view name) {
  // Greedy, with one place to come back to: the last star, and how much it has taken.
  size_t p = 0, n = 0, star = std::string_view::npos, taken = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  return std::all_of(pattern.begin() + static_cast<std::ptrdiff_t>(p), pattern.end(),
                     [](char c) { return c == '*'; });
}

void check_patterns(std::span<const std::string> patterns, std::span<const std::string> names,
                    std::string_view key) {
  for (const std::string& pattern : patterns) {
    if (std::any_of(names.begin(), names.end(),
                    [&](const auto& name) { return matches_pattern(pattern, name); }))
      continue;
    const std::string near = nearest(pattern, names);
    throw BadConfig("{} = '{}' fits no weight of the model{}", key, pattern,
                    near.empty() ? std::string() : fmt::format("; did you mean '{}'?", near));
  }
}

}  // namespace titanium
