#include <map>

#include "titanium/base/error.h"
#include "titanium/models/model.h"

namespace titanium {

ModelSpec model_registry(const HfConfig& config, ModelHead head) {
  // HF model_type -> how to build it.  A new dense family is one line here and its flags in
  // config/hf_config.cpp.
  static const std::map<std::string, Model (*)(const HfConfig&, ModelHead, const Tp&)> families = {
      {"llama", dense_decoder},
      {"mistral", dense_decoder},
      {"qwen2", dense_decoder},
      {"qwen3", dense_decoder},
  };
  const auto family = families.find(config.model_type);
  if (family == families.end()) {
    std::string known;
    for (const auto& [name, build] : families) known += (known.empty() ? "" : ", ") + name;
    throw BadConfig("config.json: model_type '{}' is not supported; known: {}", config.model_type, known);
  }
  const auto make = [build = family->second, head](const HfConfig& c, const Tp& tp) {
    return build(c, head, tp);
  };
  return {derive_model_name_and_flavor(config), config, make};
}

}  // namespace titanium
