// Ranks that hold CUDA tensors: NCCL for those, gloo (gloo.h) for tensors of the host, bytes, barriers, and
// to learn who is lost.
#pragma once
#include <memory>
#include <string>

#include "titanium/config/train_config.h"
#include "titanium/dist/world.h"

namespace titanium {

// As gloo_world.  Sums of CUDA tensors are equal on all ranks and in every run of the same ranks and devices,
// but in NCCL's order; those of 16-bit dtypes are taken in fp32 and rounded once.  BadConfig where the build
// has no NCCL.
std::shared_ptr<World> nccl_world(const CommConfig& comm, int rank, int size, const std::string& addr,
                                  int port);

}  // namespace titanium
