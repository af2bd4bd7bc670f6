// "Did you mean ...?"
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace titanium {

// Insertions, deletions, replacements and swaps of neighbours that turn one into the other.
int edit_distance(std::string_view a, std::string_view b);

// The closest of the names, where it is close enough to be a slip; else empty.
std::string nearest(std::string_view given, std::span<const std::string> names);

}  // namespace titanium
