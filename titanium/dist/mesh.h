// Where a rank stands among all ranks, and the groups that follow.  The order of ranks is torchtitan's: pp,
// then dp_replicate, dp_shard, cp, tp, the last one fastest.
#pragma once
#include <memory>
#include <vector>

#include "titanium/dist/group.h"
#include "titanium/dist/parallel_dims.h"
#include "titanium/dist/world.h"

namespace titanium {

struct Coordinates {
  int pp = 0, dp_replicate = 0, dp_shard = 0, cp = 0, tp = 0;
  bool operator==(const Coordinates&) const = default;
};
Coordinates coordinates_of(const ParallelDims& dims, int rank);
int rank_of(const ParallelDims& dims, const Coordinates& at);

// Ranks, ascending, that differ from `rank` in the named axes alone.
struct Axes {
  bool pp = false, dp_replicate = false, dp_shard = false, cp = false, tp = false;
};
std::vector<int> ranks_along(const ParallelDims& dims, int rank, Axes axes);

// The replica group (design D3) of a weight slice that the tp coordinates [tp_begin, tp_end) hold: the ranks
// of this dp_replicate copy with those coordinates, and one of the pp coordinates in `pps` (none: the rank's
// own), ascending.
std::vector<int> replica_ranks(const ParallelDims& dims, int rank, int tp_begin, int tp_end,
                               const std::vector<int>& pps = {});

class Mesh {
 public:
  Mesh();  // one rank
  // dims are resolved, and their product is the world's size.
  Mesh(const ParallelDims& dims, std::shared_ptr<World> world);

  const ParallelDims& dims() const { return dims_; }
  const Coordinates& at() const { return at_; }
  World& world() const { return *world_; }
  int rank() const { return world_->rank(); }

  const Group& all() const { return all_; }
  const Group& tp() const { return tp_; }
  const Group& pp() const { return pp_; }
  const Group& data() const { return data_; }            // ranks with other samples: dp_replicate x dp_shard
  const Group& replicate() const { return replicate_; }  // ranks that own the same elements: dp_replicate
  const Group& copy() const { return copy_; }  // the owners of all elements, once each: one dp_replicate copy
  Group replicas(int tp_begin, int tp_end, const std::vector<int>& pps = {}) const;  // see replica_ranks
  // This rank and the one of another pp coordinate; the purpose is a channel of its own.
  Group link(int pp, const std::string& purpose) const;

 private:
  ParallelDims dims_;
  std::shared_ptr<World> world_;
  Coordinates at_;
  Group all_, tp_, pp_, data_, replicate_, copy_;
};

}  // namespace titanium
