// Python's methods of str, on UTF-8.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace titanium::jinja {

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalize(std::string_view text);
std::string title(std::string_view text);
bool is_upper(std::string_view text);
bool is_lower(std::string_view text);
bool all_have(std::string_view text, uint8_t property);  // and there is a character; property as in unicode.h

enum class Side { kBoth = 3, kLeft = 1, kRight = 2 };
// Without `characters`, white space.
std::string_view strip(std::string_view text, const std::string* characters, Side side);

// Without `separator`, at runs of white space.  At most `limit` cuts if not negative.
std::vector<std::string_view> split(std::string_view text, const std::string* separator, int64_t limit,
                                    bool from_right);
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends);
std::string replace(std::string_view text, std::string_view what, std::string_view by, int64_t limit);

}  // namespace titanium::jinja
