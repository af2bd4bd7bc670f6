#include "titanium/engine/engine.h"

#include <cstdio>
#include <exception>
#include <numeric>

namespace titanium {

const char* name(Mode mode) {
  return mode == Mode::kTrain ? "train" : mode == Mode::kEval ? "eval" : "none";
}

ModeScope::ModeScope(BaseEngine& engine, Mode mode, ModeOptions options)
    : engine_(engine), exceptions_(std::uncaught_exceptions()) {
  engine_.enter_mode(mode, options);
}

ModeScope::~ModeScope() {
  try {
    engine_.exit_mode(std::uncaught_exceptions() > exceptions_);
  } catch (const std::exception& e) {  // a destructor cannot throw
    std::fprintf(stderr, "titanium: %s\n", e.what());
  }
}

EngineOutput BaseEngine::forward_step(EngineBatch batch, const Loss* loss) {
  batch.micro = {};
  if (!batch.samples.empty()) {
    batch.micro.given.emplace_back(batch.samples.size());
    std::iota(batch.micro.given[0].begin(), batch.micro.given[0].end(), 0);
  }
  return forward_backward_batch(batch, loss, /*forward_only=*/true);
}

EngineOutput BaseEngine::train_batch(const EngineBatch& batch, const Loss& loss) {
  optimizer_zero_grad();
  EngineOutput output = forward_backward_batch(batch, &loss, /*forward_only=*/false);
  output.metrics["grad_norm"] = Report::mean(optimizer_step(), 1);
  optimizer_zero_grad();
  return output;
}

EngineOutput BaseEngine::infer_batch(const EngineBatch& batch, const Loss* loss) {
  return forward_backward_batch(batch, loss, /*forward_only=*/true);
}

}  // namespace titanium
