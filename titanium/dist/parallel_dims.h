// The degrees of parallelism, under torchtitan's names, and what they mean for a rank.
#pragma once
#include <string>
#include <vector>

namespace titanium {

struct ParallelDims {
  int dp_replicate = 1;
  int dp_shard = -1;  // -1: the ranks that are left
  int cp = 1, tp = 1, pp = 1, ep = 1;
  int world_size = 1;

  // Fills dp_shard when it is -1 and checks that the product fits the world.  BadConfig names all degrees,
  // the world size and, for an axis that this build does not run, that axis.
  void resolve();
  bool fsdp_enabled() const { return dp_shard > 1; }
};

}  // namespace titanium
