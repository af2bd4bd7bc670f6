// Rows of the layout table with ranks as processes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <tuple>

#include "tests/layouts/run_layout.h"
#include "titanium/dist/fork_ranks.h"
#include "titanium/dist/open_world.h"

namespace titanium {
namespace {

using testing::Layout;
using testing::Outcome;
using testing::run_layout;

const Layout kLayouts[] = {
    {.name = "fsdp2_always", .shard = 2, .budget = 32, .reshard = "always"},
    {.name = "fsdp3_recompute", .shard = 3, .budget = 40, .recompute = "full"},
    {.name = "hsdp2x2", .replicate = 2, .shard = 2, .budget = 32},
    {.name = "tp2", .tp = 2},
    {.name = "tp4_micro_batches", .tp = 4, .budget = 40, .recompute = "selective"},
    {.name = "fsdp2_tp2", .shard = 2, .tp = 2, .budget = 40, .reshard = "always"},
    {.name = "pp2_1f1b", .budget = 32, .pp = 2},
    {.name = "pp3_gpipe_recompute", .budget = 40, .recompute = "full", .pp = 3, .schedule = "GPipe"},
    {.name = "pp2_fsdp2_zbv", .shard = 2, .budget = 32, .pp = 2, .schedule = "ZBVZeroBubble"},
    {.name = "pp2_tp2_dualpipev", .tp = 2, .budget = 40, .pp = 2, .schedule = "DualPipeV"},
};

std::shared_ptr<World> open(const std::string& transport, int rank, int size) {
  CommConfig comm;
  comm.transport = transport;
  LaunchEnv env;
  env.by = "RANK";
  env.rank = env.local_rank = rank;
  env.size = env.local_size = size;
  env.addr_given = env.port_given = true;
  env.master_port = 20000 + ::getppid() % 10000;
  return open_world(comm, env);
}

class Processes : public ::testing::TestWithParam<std::tuple<std::string, std::string, Layout>> {};

TEST_P(Processes, EqualOneRankAndThemselves) {
  const auto& [transport, model, layout] = GetParam();
  fork_ranks(
      layout.ranks(), [&](int rank, int size) { return open(transport, rank, size); },
      [&](const std::shared_ptr<World>& world) {
        const Outcome got = run_layout(world, model, layout, "float64");
        const Outcome again = run_layout(world, model, layout, "float64");
        const Outcome single = run_layout(world, model, layout, "float32");
        testing::expect_bitwise(again, got);
        if (world->rank() == 0) {
          testing::expect_equal_fp64(got, run_layout(model, Layout{"one rank"}, "float64"));
          testing::expect_equal_fp32(single, run_layout(model, Layout{"one rank"}, "float32"));
        }
        world->all().barrier();
      });
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<std::string, std::string, Layout>>& info) {
  const auto& [transport, model, layout] = info.param;
  return transport + "_" + model + "_" + layout.name;
}

INSTANTIATE_TEST_SUITE_P(Local, Processes,
                         ::testing::Combine(::testing::Values("local"),
                                            ::testing::Values("llama3", "qwen3_tied"),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Gloo, Processes,
                         ::testing::Combine(::testing::Values("gloo"), ::testing::Values("qwen3_tied"),
                                            ::testing::ValuesIn(kLayouts)),
                         name_of);

}  // namespace
}  // namespace titanium
