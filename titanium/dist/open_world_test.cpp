#include "titanium/dist/open_world.h"

#include <gtest/gtest.h>

#include <map>

#include "titanium/base/error.h"

namespace titanium {
namespace {

using Variables = std::map<std::string, std::string>;

LaunchEnv read(const Variables& variables) {
  return read_launch_env([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

std::string refusal(const Variables& variables) {
  try {
    const LaunchEnv env = read(variables);
    return fmt::format("rank {} of {}", env.rank, env.size);
  } catch (const BadConfig& e) {
    return e.what();
  }
}

TEST(LaunchEnv, NothingSetIsAWorldOfOne) {
  const LaunchEnv env = read({{"MASTER_ADDR", "10.0.0.1"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
  EXPECT_EQ(env.size, 1);
  EXPECT_EQ(env.by, "");
  EXPECT_EQ(open_world({}, env)->size(), 1);
}

TEST(LaunchEnv, Torchrun) {
  const LaunchEnv env = read({{"RANK", "5"},
                              {"WORLD_SIZE", "8"},
                              {"LOCAL_RANK", "1"},
                              {"LOCAL_WORLD_SIZE", "4"},
                              {"MASTER_ADDR", "10.0.0.1"},
                              {"MASTER_PORT", "1234"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_PROCID", "0"},
                              {"SLURM_NTASKS", "2"}});
  EXPECT_EQ(env.by, "RANK");
  EXPECT_EQ(env.rank, 5);
  EXPECT_EQ(env.size, 8);
  EXPECT_EQ(env.local_rank, 1);
  EXPECT_EQ(env.local_size, 4);
  EXPECT_EQ(env.master_addr, "10.0.0.1");
  EXPECT_EQ(env.master_port, 1234);
  EXPECT_FALSE(env.one_host());
}

TEST(LaunchEnv, OpenMpi) {
  const LaunchEnv env = read({{"OMPI_COMM_WORLD_RANK", "1"},
                              {"OMPI_COMM_WORLD_SIZE", "2"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                              {"PMIX_NAMESPACE", "77"}});
  EXPECT_EQ(env.rank, 1);
  EXPECT_EQ(env.size, 2);
  EXPECT_TRUE(env.one_host());
  EXPECT_EQ(env.job, "77.");
}

TEST(LaunchEnv, PmiAndSlurm) {
  const LaunchEnv pmi = read({{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}});
  EXPECT_EQ(pmi.rank, 2);
  EXPECT_EQ(pmi.size, 3);
  EXPECT_TRUE(pmi.one_host());
  Variables slurm = {{"SLURM_STEP_ID", "0"},   {"SLURM_JOB_ID", "9"},       {"SLURM_PROCID", "3"},
                     {"SLURM_NTASKS", "4"},    {"SLURM_LOCALID", "1"},      {"SLURM_STEP_NUM_NODES", "2"},
                     {"MASTER_ADDR", "node0"}, {"SLURM_STEP_NUM_TASKS", ""}};
  EXPECT_EQ(read(slurm).rank, 3);
  EXPECT_EQ(read(slurm).size, 4);
  EXPECT_FALSE(read(slurm).one_host());
  slurm["SLURM_STEP_NUM_NODES"].assign(1, '1');
  EXPECT_TRUE(read(slurm).one_host());
  EXPECT_EQ(read(slurm).job, "9.0.");
}

TEST(LaunchEnv, WhatIsWrongIsNamed) {
  EXPECT_EQ(refusal({{"RANK", "0"}}),
            "the environment says RANK=0 but not WORLD_SIZE: both are needed, or none");
  EXPECT_EQ(refusal({{"WORLD_SIZE", "2"}}),
            "the environment says WORLD_SIZE=2 but not RANK: both are needed, or none");
  EXPECT_EQ(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
            "the environment says RANK=2, WORLD_SIZE=2: a rank is below the number of ranks");
  for (const char* bad : {"x", "-1", "1.5", " 1", "1 ", "0x1", "99999999999999"}) {
    EXPECT_EQ(refusal({{"RANK", bad}, {"WORLD_SIZE", "2"}}),
              fmt::format("the environment says RANK={}: allowed: an integer from 0 to 16777216", bad));
  }
  const Variables good = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  const auto with = [&](Variables more) {
    more.insert(good.begin(), good.end());
    return refusal(more);
  };
  EXPECT_EQ(with({}), "rank 0 of 2");
  EXPECT_EQ(with({{"WORLD_SIZE", "0"}}),
            "the environment says WORLD_SIZE=0: allowed: an integer from 1 to 16777216");
  EXPECT_EQ(with({{"MASTER_PORT", "70000"}}),
            "the environment says MASTER_PORT=70000: allowed: an integer from 1 to 65535");
  EXPECT_EQ(
      with({{"LOCAL_WORLD_SIZE", "3"}}),
      "the environment says LOCAL_WORLD_SIZE=3, WORLD_SIZE=2: a host holds no more ranks than there are");
  EXPECT_EQ(with({{"LOCAL_WORLD_SIZE", "1"}, {"LOCAL_RANK", "1"}}),
            "the environment says LOCAL_RANK=1 of 1 ranks on this host: a local rank is below their number");
}

TEST(OpenWorld, ATransportThatIsNotThereIsRefused) {
  LaunchEnv env = read({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "1"}});
  EXPECT_THROW(open_world({.transport = "nccl"}, env), BadConfig);
  EXPECT_THROW(open_world({.transport = "local"}, env), BadConfig);
}

}  // namespace
}  // namespace titanium
