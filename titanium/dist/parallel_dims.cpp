#include "titanium/dist/parallel_dims.h"

#include <algorithm>
#include <cstdint>

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
  if (cp != 1) throw BadConfig("parallelism.context_parallel_degree = {}: not in this version, give 1", cp);
  if (ep != 1) throw BadConfig("parallelism.expert_parallel_degree = {}: not in this version, give 1", ep);
  const int64_t rest = int64_t{dp_replicate} * cp * tp * pp;
  const int64_t shard = dp_shard == -1 ? world_size / rest : dp_shard;
  if (shard < 1 || shard * rest != world_size) {
    const int64_t fits =
        std::max<int64_t>(1, (world_size + rest / 2) / rest);  // the nearest multiple of the others
    throw BadConfig(
        "parallelism: data_parallel_replicate_degree {} x data_parallel_shard_degree {} x "
        "context_parallel_degree {} x tensor_parallel_degree {} x pipeline_parallel_degree {} must be the "
        "world size, "
        "{}; nearest: {}",
        dp_replicate, dp_shard, cp, tp, pp, world_size,
        world_size % rest == 0
            ? fmt::format("data_parallel_shard_degree {} with the other degrees", world_size / rest)
            : fmt::format("{} ranks with data_parallel_shard_degree {}", fits * rest, fits));
  }
  dp_shard = static_cast<int>(shard);
}

}  // namespace titanium
