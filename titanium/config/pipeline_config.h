// How a model is cut into pipeline stages, and in which order they run.
#pragma once
#include <cstdint>
#include <string>

namespace titanium {

// The keys pipeline_parallel_* of a run's [parallelism] or of verl's engine.  Messages name them without the
// section.
struct PipelineConfig {
  std::string schedule = "1F1B", schedule_csv;
  int64_t layers_per_stage = 0;  // 0: as many stages as the schedule has a rank, at least
  int64_t first_less_layers = -1, last_less_layers = -1;  // -1: by cost
};

}  // namespace titanium
