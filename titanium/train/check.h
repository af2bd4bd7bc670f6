// Compares this build with reference values that lie beside a model (tests/data/README.md): the trust test of
// a model family, a recompute mode or a new kernel.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "titanium/config/train_config.h"
#include "titanium/dist/world.h"
#include "titanium/report/log.h"

namespace titanium {

struct CheckLine {
  std::string quantity;   // "log-prob T=0.7", "gradient model.norm.weight", ...
  double difference = 0;  // the largest over all elements; relative L2 for gradients
  double tolerance = 0;   // allowed
  bool ok() const { return difference <= tolerance; }  // NaN is not ok
};

// Runs the packed batch and the prompt of folder/expected.safetensors in the dtypes, recompute mode and
// micro-batch budget of `config`: log-probs and entropies at temperatures 1 and 0.7, loss, every gradient,
// the gradient norm, greedy ids.  fp32 compares within folder/meta.json's tolerances, fp64 with the float64
// values at 1e-9.  bf16 compute is compared with the float64 values, within twice the errors that meta.json
// says plain bf16 arithmetic has.  BadConfig, BadCheckpoint: a file or tensor is missing.
// Over the ranks of `world` (null: one), laid out as parallelism's degrees say, every rank gets the same
// lines; greedy ids are left out where tensor parallelism cuts the model.
std::vector<CheckLine> check_model(const std::filesystem::path& folder, const TrainConfig& config, Log& log,
                                   std::shared_ptr<World> world = nullptr);

}  // namespace titanium
