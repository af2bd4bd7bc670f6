#include "titanium/base/openmp.h"

#include <unistd.h>

#include <cstdlib>

namespace titanium {

void let_idle_threads_sleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  setenv("GOMP_SPINCOUNT", "10000", 1);
  execv("/proc/self/exe", argv);
}

}  // namespace titanium
