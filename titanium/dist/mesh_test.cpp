#include "titanium/dist/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "titanium/base/error.h"
#include "titanium/dist/planned_world.h"

namespace titanium {
namespace {

ParallelDims dims(int replicate, int shard, int tp) {
  ParallelDims d{
      .dp_replicate = replicate, .dp_shard = shard, .tp = tp, .world_size = replicate * shard * tp};
  d.resolve();
  return d;
}

TEST(Mesh, TensorParallelRanksAreNeighboursAndReplicasAreFarthest) {
  const ParallelDims d = dims(2, 3, 2);
  EXPECT_EQ(coordinates_of(d, 0), (Coordinates{}));
  EXPECT_EQ(coordinates_of(d, 1), (Coordinates{.tp = 1}));
  EXPECT_EQ(coordinates_of(d, 2), (Coordinates{.dp_shard = 1}));
  EXPECT_EQ(coordinates_of(d, 6), (Coordinates{.dp_replicate = 1}));
  for (int rank = 0; rank < d.world_size; ++rank) EXPECT_EQ(rank_of(d, coordinates_of(d, rank)), rank);
}

TEST(Mesh, RanksAlongAxes) {
  const ParallelDims d = dims(2, 3, 2);
  EXPECT_EQ(ranks_along(d, 9, {.tp = true}), (std::vector<int>{8, 9}));
  EXPECT_EQ(ranks_along(d, 9, {.dp_shard = true}), (std::vector<int>{7, 9, 11}));
  EXPECT_EQ(ranks_along(d, 9, {.dp_replicate = true}), (std::vector<int>{3, 9}));
  EXPECT_EQ(ranks_along(d, 9, {.dp_replicate = true, .dp_shard = true}),
            (std::vector<int>{1, 3, 5, 7, 9, 11}));
}

TEST(Mesh, ReplicaGroupsOfOneCopyHoldTheSameSlice) {
  const ParallelDims d = dims(2, 2, 4);
  EXPECT_EQ(replica_ranks(d, 2, 2, 3), (std::vector<int>{2, 6}));  // cut over tp: the FSDP ranks
  EXPECT_EQ(replica_ranks(d, 2, 0, 4), (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));  // whole on tp
  EXPECT_EQ(replica_ranks(d, 10, 2, 4), (std::vector<int>{10, 11, 14, 15}));         // a kv head on two ranks
}

TEST(Mesh, OfOneRankNeedsNoTransport) {
  const Mesh mesh;
  EXPECT_EQ(mesh.tp().size(), 1);
  EXPECT_EQ(mesh.copy().size(), 1);
  EXPECT_EQ(mesh.replicas(0, 1).size(), 1);
  EXPECT_EQ(mesh.data().sum(2.5), 2.5);
}

// A rank of a cluster that is not there: the same groups, for all of which it speaks, and no tensors.
TEST(Mesh, OfAPlannedWorld) {
  const ParallelDims d = dims(2, 3, 2);
  const Mesh mesh(d, planned_world(9, 12));
  EXPECT_EQ(mesh.at(), coordinates_of(d, 9));
  EXPECT_EQ(mesh.tp().size(), 2);
  EXPECT_EQ(mesh.tp().rank(), 1);
  EXPECT_EQ(mesh.data().size(), 6);
  EXPECT_EQ(mesh.data().rank(), 4);
  EXPECT_EQ(mesh.replicas(1, 2).size(), 3);
  EXPECT_EQ(mesh.all().exchange("a"), std::vector<std::string>{"a"});
  EXPECT_THROW(mesh.tp().all_gather(at::ones({2})), Bug);
}

}  // namespace
}  // namespace titanium
