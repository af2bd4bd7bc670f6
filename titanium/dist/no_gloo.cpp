// In place of gloo.cpp where Gloo's headers are missing.
#include "titanium/base/error.h"
#include "titanium/dist/gloo.h"

namespace titanium {

std::shared_ptr<World> gloo_world(const CommConfig&, int, int, const std::string&, int) {
  throw BadConfig(
      "comm.transport = gloo: this build is without it, because the headers of Gloo were not there; install "
      "libgloo-dev and build again; ranks of one host can use comm.transport = local");
}

}  // namespace titanium
