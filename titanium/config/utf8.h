#pragma once
#include <string_view>

namespace titanium {

bool is_utf8(std::string_view bytes);  // no overlong forms, no surrogates (RFC 3629)

}  // namespace titanium
