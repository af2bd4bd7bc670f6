// Rope settings of a config.json.  Private to this room.
#pragma once
#include <string>

#include "titanium/config/rope.h"
#include "titanium/formats/json.h"

namespace titanium {

// `json` is the whole file, an object.  BadConfig names `source` and the key.
Rope read_rope(const Json& json, const std::string& source);

}  // namespace titanium
