// In place of nccl.cpp where CUDA is off, or the headers of NCCL are missing.
#include "titanium/base/error.h"
#include "titanium/dist/nccl.h"

namespace titanium {

std::shared_ptr<World> nccl_world(const CommConfig&, int, int, const std::string&, int) {
  throw BadConfig(
      "comm.transport = nccl: this build is without it; build with -DTITANIUM_CUDA=ON where the headers of "
      "NCCL "
      "and CUDA are and gloo is built too; ranks on CPUs can use gloo or local");
}

}  // namespace titanium
