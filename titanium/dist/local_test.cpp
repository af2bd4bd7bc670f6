#include "titanium/dist/local.h"

#include <ATen/ATen.h>

#include "titanium/base/error.h"
#include "titanium/dist/conformance.h"
#include "titanium/dist/run_ranks.h"

namespace titanium {
namespace {

INSTANTIATE_TEST_SUITE_P(LocalThreads, Conformance,
                         ::testing::Values(Backend{.name = "threads", .run = run_ranks}),
                         ::testing::PrintToStringParamName());

TEST(Local, RanksThatDoNotCallTheSameAreABug) {
  EXPECT_THROW(run_ranks(2,
                         [](std::shared_ptr<World> world) {
                           const Group all = world->all();
                           if (world->rank() == 0) {
                             all.all_reduce(at::ones({4}));
                           } else {
                             all.barrier();
                           }
                         }),
               Bug);
  EXPECT_THROW(run_ranks(2,
                         [](std::shared_ptr<World> world) {
                           world->all().all_gather(at::ones({world->rank() == 0 ? 4 : 6}));
                         }),
               Bug);
  EXPECT_THROW(
      run_ranks(2, [](std::shared_ptr<World> world) { world->all().all_reduce(at::ones({4}, at::kByte)); }),
      Bug);
}

TEST(Local, AWorldOfOneRunsToo) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    EXPECT_EQ(world->all().size(), 1);
    EXPECT_EQ(world->all().sum(3), 3);
  });
}

TEST(Local, NotANumberStaysOneInAMaximum) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    at::Tensor flat = at::full({2}, world->rank() + 1.0);
    flat[world->rank()] = nan;
    world->all().all_reduce(flat, ReduceOp::kMax);
    EXPECT_TRUE(flat.isnan().all().item<bool>());
  });
}

}  // namespace
}  // namespace titanium
