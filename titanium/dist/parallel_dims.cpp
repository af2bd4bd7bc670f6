#include "titanium/dist/parallel_dims.h"

#include "titanium/base/error.h"

namespace titanium {

void ParallelDims::resolve() {
  struct Axis {
    const char* key;
    int degree;
  };
  const Axis axes[] = {{"data_parallel_replicate_degree", dp_replicate},
                       {"context_parallel_degree", cp},
                       {"tensor_parallel_degree", tp},
                       {"pipeline_parallel_degree", pp},
                       {"expert_parallel_degree", ep}};
  for (const Axis& axis : axes) {
    if (axis.degree < 1) {
      throw BadConfig("parallelism.{} = {}: must be at least 1", axis.key, axis.degree);
    }
  }
  if (dp_shard != -1 && dp_shard < 1) {
    throw BadConfig(
        "parallelism.data_parallel_shard_degree = {}: must be -1 (the ranks that are left) or at least 1",
        dp_shard);
  }
  const int rest = dp_replicate * cp * tp * pp;
  const int shard = dp_shard == -1 ? world_size / rest : dp_shard;
  if (shard < 1 || shard * rest != world_size) {
    throw BadConfig(
        "parallelism: data_parallel_replicate_degree {} x data_parallel_shard_degree {} x "
        "context_parallel_degree {} x "
        "tensor_parallel_degree {} x pipeline_parallel_degree {} must be the world size, {}",
        dp_replicate, dp_shard, cp, tp, pp, world_size);
  }
  dp_shard = shard;
  if (world_size != 1 || ep != 1) {
    throw BadConfig("parallelism: this build runs one rank; the degrees ask for {}", world_size * ep);
  }
}

}  // namespace titanium
