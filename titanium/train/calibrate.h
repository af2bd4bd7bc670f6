// The rates of this machine for a model, measured on its own blocks.
#pragma once
#include "titanium/config/hardware.h"
#include "titanium/config/train_config.h"
#include "titanium/dist/world.h"
#include "titanium/report/log.h"
#include "titanium/train/estimate.h"

namespace titanium {

// Runs a layer, the head, the optimizer and, where the world has several ranks, collectives, all ranks at the
// same time; medians, of which all ranks get the mean.  Weights are random: only config.json is read, and
// only one layer and the head are touched.  One rank cannot measure links: theirs are a copy's.
Hardware calibrate(const TrainConfig& config, const StepShape& shape, World& world, Log& log);

}  // namespace titanium
