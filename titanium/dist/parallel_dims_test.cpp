#include "titanium/dist/parallel_dims.h"

#include <gtest/gtest.h>

#include "titanium/base/error.h"

namespace titanium {
namespace {

TEST(ParallelDims, OneRank) {
  ParallelDims dims;
  dims.resolve();
  EXPECT_EQ(dims.dp_shard, 1);
}

TEST(ParallelDims, ProductMustFitTheWorldAndNamesTheDegrees) {
  ParallelDims dims;
  dims.tp = 2;
  try {
    dims.resolve();
    FAIL() << "tp 2 in a world of 1 was accepted";
  } catch (const BadConfig& e) {
    EXPECT_NE(std::string(e.what()).find("tensor_parallel_degree 2"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("world size, 1"), std::string::npos) << e.what();
  }
  dims = {};
  dims.ep = 2;
  EXPECT_THROW(dims.resolve(), BadConfig);
  dims = {};
  dims.dp_shard = 0;
  EXPECT_THROW(dims.resolve(), BadConfig);
}

std::string refusal(ParallelDims dims) {
  try {
    dims.resolve();
  } catch (const BadConfig& e) {
    return e.what();
  }
  return "accepted";
}

TEST(ParallelDims, TheRestGoesToShards) {
  ParallelDims dims{.dp_replicate = 2, .tp = 2, .world_size = 12};
  dims.resolve();
  EXPECT_EQ(dims.dp_shard, 3);
}

TEST(ParallelDims, NamesWhatWouldFit) {
  EXPECT_NE(refusal({.dp_shard = 3, .tp = 2, .world_size = 8}).find("nearest: data_parallel_shard_degree 4"),
            std::string::npos);
  EXPECT_NE(refusal({.tp = 3, .world_size = 8}).find("nearest: 9 ranks with data_parallel_shard_degree 3"),
            std::string::npos);
  EXPECT_NE(refusal({.dp_replicate = 1 << 16, .tp = 1 << 16, .world_size = 8}).find("world size, 8"),
            std::string::npos);
}

TEST(ParallelDims, AxesOfLaterVersionsAreRefusedByKey) {
  EXPECT_NE(refusal({.cp = 2, .world_size = 2}).find("context_parallel_degree = 2"), std::string::npos);
  EXPECT_NE(refusal({.pp = 2, .world_size = 3}).find("pipeline_parallel_degree 2"), std::string::npos);
}

}  // namespace
}  // namespace titanium
