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

}  // namespace
}  // namespace titanium
