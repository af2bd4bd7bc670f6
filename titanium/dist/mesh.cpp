#include "titanium/dist/mesh.h"

#include <algorithm>

#include "titanium/base/error.h"

namespace titanium {

Coordinates coordinates_of(const ParallelDims& dims, int rank) {
  Coordinates at;
  at.tp = rank % dims.tp;
  rank /= dims.tp;
  at.cp = rank % dims.cp;
  rank /= dims.cp;
  at.dp_shard = rank % dims.dp_shard;
  rank /= dims.dp_shard;
  at.dp_replicate = rank % dims.dp_replicate;
  at.pp = rank / dims.dp_replicate;
  return at;
}

int rank_of(const ParallelDims& dims, const Coordinates& at) {
  return (((at.pp * dims.dp_replicate + at.dp_replicate) * dims.dp_shard + at.dp_shard) * dims.cp + at.cp) *
             dims.tp +
         at.tp;
}

namespace {

template <typename Belongs>
std::vector<int> ranks_where(const ParallelDims& dims, Belongs belongs) {
  std::vector<int> ranks;
  for (int rank = 0; rank < dims.world_size; ++rank) {
    if (belongs(coordinates_of(dims, rank))) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

std::vector<int> ranks_along(const ParallelDims& dims, int rank, Axes axes) {
  const Coordinates at = coordinates_of(dims, rank);
  return ranks_where(dims, [&](const Coordinates& other) {
    return (axes.pp || other.pp == at.pp) && (axes.dp_replicate || other.dp_replicate == at.dp_replicate) &&
           (axes.dp_shard || other.dp_shard == at.dp_shard) && (axes.cp || other.cp == at.cp) &&
           (axes.tp || other.tp == at.tp);
  });
}

std::vector<int> replica_ranks(const ParallelDims& dims, int rank, int tp_begin, int tp_end,
                               const std::vector<int>& pps) {
  const Coordinates at = coordinates_of(dims, rank);
  return ranks_where(dims, [&](const Coordinates& other) {
    const bool stage =
        pps.empty() ? other.pp == at.pp : std::find(pps.begin(), pps.end(), other.pp) != pps.end();
    return stage && other.dp_replicate == at.dp_replicate && other.tp >= tp_begin && other.tp < tp_end;
  });
}

Mesh::Mesh() : Mesh(ParallelDims{.dp_shard = 1}, solo_world()) {}

Mesh::Mesh(const ParallelDims& dims, std::shared_ptr<World> world)
    : dims_(dims), world_(std::move(world)), at_(coordinates_of(dims, world_->rank())) {
  if (dims_.world_size != world_->size()) {
    throw Bug("a mesh of {} ranks in a world of {}", dims_.world_size, world_->size());
  }
  const auto along = [&](Axes axes) { return world_->group(ranks_along(dims_, world_->rank(), axes)); };
  all_ = world_->all();
  tp_ = along({.tp = true});
  pp_ = along({.pp = true});
  data_ = along({.dp_replicate = true, .dp_shard = true});
  replicate_ = along({.dp_replicate = true});
  copy_ = along({.pp = true, .dp_shard = true, .cp = true, .tp = true});
}

Group Mesh::replicas(int tp_begin, int tp_end, const std::vector<int>& pps) const {
  // A channel of its own: what a unit starts goes through a thread, which collectives within a block, over
  // the same ranks, are better without.
  return world_->group(replica_ranks(dims_, world_->rank(), tp_begin, tp_end, pps), "units");
}

Group Mesh::link(int pp, const std::string& purpose) const {
  Coordinates other = at_;
  other.pp = pp;
  std::vector<int> ranks = {world_->rank(), rank_of(dims_, other)};
  std::sort(ranks.begin(), ranks.end());
  return world_->group(ranks, purpose);
}

}  // namespace titanium
