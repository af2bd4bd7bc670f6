// Losses by name, for callers that cannot hand over an object.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "titanium/formats/json.h"
#include "titanium/loss/token_stats.h"

namespace titanium {

std::vector<std::string> loss_names();

// {"name": "sft", setting: value, ...}; docs/serve.md lists names and settings.  BadConfig names the loss,
// the setting, and what is allowed.
std::unique_ptr<Loss> make_loss(const Json& json);

}  // namespace titanium
