// Sets of weights by name patterns.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace titanium {

// True where the whole name fits: * stands for any characters (dots too), ? for one.
bool matches_pattern(std::string_view pattern, std::string_view name);

// BadConfig for a pattern that fits none of the names: `key` and the nearest name are in the message.
void check_patterns(std::span<const std::string> patterns, std::span<const std::string> names,
                    std::string_view key);

}  // namespace titanium
