#include "titanium/base/error.h"
#include "titanium/engine/engine.h"
#include "titanium/engine/titan_engine.h"

namespace titanium {
namespace {

template <typename Engine>
EngineRegistry::Factory on(const std::string& device) {
  return [device](const EngineConfig& config, Log& log, std::shared_ptr<World> world) {
    return std::make_unique<Engine>(config, device, log, std::move(world));
  };
}

}  // namespace

EngineRegistry::EngineRegistry() {
  const std::vector<std::string> backends = {"titanium", "torchtitan"};
  register_engine("language_model", backends, {"cpu"}, on<TitanEngineWithLMHead>("cpu"));
  register_engine("value_model", backends, {"cpu"}, on<TitanEngineWithValueHead>("cpu"));
}

void EngineRegistry::register_engine(const std::string& model_type, const std::vector<std::string>& backends,
                                     const std::vector<std::string>& devices, Factory factory) {
  for (const std::string& backend : backends) {
    for (const std::string& device : devices) {
      if (!factories_.try_emplace({model_type, backend, device}, factory).second)
        throw Bug("the engine ({}, {}, {}) is registered already", model_type, backend, device);
    }
  }
}

const EngineRegistry::Factory& EngineRegistry::get_engine_cls(const std::string& model_type,
                                                              const std::string& backend,
                                                              const std::string& device) const {
  const auto found = factories_.find({model_type, backend, device});
  if (found != factories_.end()) return found->second;
  std::string known;
  for (const auto& [key, factory] : factories_) {
    known += fmt::format("{}({}, {}, {})", known.empty() ? "" : ", ", std::get<0>(key), std::get<1>(key),
                         std::get<2>(key));
  }
  throw BadConfig("there is no engine (model_type {}, backend {}, device {}); there are: {}", model_type,
                  backend, device, known);
}

std::unique_ptr<BaseEngine> EngineRegistry::create(const std::string& model_type, const std::string& backend,
                                                   const std::string& device, const EngineConfig& config,
                                                   Log& log, std::shared_ptr<World> world) const {
  return get_engine_cls(model_type, backend, device)(config, log, std::move(world));
}

}  // namespace titanium
