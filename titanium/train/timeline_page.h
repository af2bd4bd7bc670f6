// A simulated step as something to look at.
#pragma once
#include <string>

#include "titanium/train/estimate.h"

namespace titanium {

struct TimelinePage {
  std::string title;               // of the run, one line
  std::vector<std::string> ranks;  // names of the pipeline ranks
};

// One HTML page that needs nothing else: what every pipeline rank computes and moves over time, and the bytes
// that it holds.  The wheel zooms, a drag moves, an action under the pointer is named.
std::string timeline_html(const TimelinePage& page, const StepEstimate& estimate, const Timeline& timeline);

// The same for Perfetto and chrome://tracing: a process a rank, threads for compute and transfers, a counter
// for memory.
std::string timeline_trace(const TimelinePage& page, const StepEstimate& estimate, const Timeline& timeline);

}  // namespace titanium
