#pragma once
#include <string>
#include <string_view>

namespace titanium {

// Refuses, before the parser sees it, text that toml++ 3.3 cannot take safely.  It takes tables apart by
// recursion and a dotted key makes a table a dot, so depth is bounded; and its test for white space outside
// ASCII has undefined results, so such characters stand in strings and comments alone, where TOML wants them
// anyway.  BadConfig with source and line.
void guard_toml(std::string_view text, const std::string& source);

}  // namespace titanium
