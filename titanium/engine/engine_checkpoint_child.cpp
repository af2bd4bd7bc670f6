// A process for engine_checkpoint_test.cpp to kill: trains and saves FOLDER/global_step_1, _2, ... of MODEL,
// keeping two, and prints each number when its save has returned.
#include <ATen/Parallel.h>

#include <cstdio>

#include "titanium/engine/engine.h"
#include "titanium/loss/sft.h"

using namespace titanium;

int main(int, char** arguments) try {
  const std::filesystem::path folder = arguments[1];
  at::set_num_threads(1);
  LogOptions quiet;
  quiet.level = LogLevel::kWarning;
  Log log(quiet);
  Json json;
  json["model"]["path"] = arguments[2];
  json["engine"]["dtype"] = "float32";
  json["engine"]["max_token_len_per_gpu"] = 64;
  const auto engine =
      EngineRegistry().create("language_model", "titanium", "cpu", EngineConfig::from_json(json), log);
  engine->initialize();
  EngineBatch batch;
  batch.samples.emplace_back();
  batch.samples[0].ids = {1, 2, 3, 4};
  batch.samples[0].loss_mask = {0, 1, 1, 1};
  for (int64_t step = 1;; ++step) {
    engine->train_batch(batch, SftLoss());
    engine->lr_scheduler_step();
    engine->save_checkpoint(folder / ("global_step_" + std::to_string(step)), step, 2);
    std::printf("%ld\n", step);
    std::fflush(stdout);
  }
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
