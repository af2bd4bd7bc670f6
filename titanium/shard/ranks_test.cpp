// Units and slices over several ranks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "titanium/dist/run_ranks.h"
#include "titanium/shard/param_store.h"

namespace titanium {
namespace {

ParallelDims dims_of(int replicate, int shard, int tp) {
  return {.dp_replicate = replicate, .dp_shard = shard, .tp = tp, .world_size = replicate * shard * tp};
}

// One block: a matrix cut by rows (5 and 2), one by columns (3 and 6), one that both coordinates hold, a
// norm.
std::unique_ptr<WeightTable> table_of(int tp, int tp_size) {
  auto table = std::make_unique<WeightTable>(tp, tp_size);
  std::vector<TpPart> rows, cols, shared;
  if (tp_size == 2) {
    rows = {{0, 5, 0, 1}, {5, 7, 1, 2}};
    cols = {{0, 3, 0, 1}, {3, 9, 1, 2}};
    shared = {{0, 4, 0, 2}, {0, 4, 0, 2}};
  }
  table->add("rows", {7, 30}, Split::kRows, {}, 0, rows);
  table->add("cols", {40, 9}, Split::kCols, {}, 0, cols);
  table->add("shared", {4, 30}, Split::kRows, {}, 0, shared);
  table->add("norm", {30}, Split::kWhole, {Init::kOnes}, 0);
  return table;
}

void on_ranks(const ParallelDims& dims, const std::function<void(ParamStore&)>& test,
              StoreDtypes dtypes = {}) {
  run_ranks(dims.world_size, [&](std::shared_ptr<World> world) {
    const Mesh mesh(dims, world);
    const auto table = table_of(mesh.at().tp, dims.tp);
    StoreOptions options;
    options.mesh = mesh;
    options.dtypes = dtypes;
    ParamStore store(*table, 1, options);
    test(store);
  });
}

class Ranks : public testing::TestWithParam<std::tuple<int, int, int>> {
 protected:
  ParallelDims dims() const {
    const auto [replicate, shard, tp] = GetParam();
    return dims_of(replicate, shard, tp);
  }
};

TEST_P(Ranks, EveryElementHasOneOwnerInACopyAndEveryRankKnowsAll) {
  std::mutex mutex;
  std::map<std::pair<int, std::string>, std::multiset<int64_t>> owned;  // by copy and weight
  on_ranks(dims(), [&](ParamStore& store) {
    const std::lock_guard lock(mutex);
    for (const Slice& slice : store.slices()) {
      int64_t at = 0;
      slice.each_run([&](const Slice::Run& run) {
        EXPECT_EQ(run.begin, at);  // runs follow each other in the slice
        for (int64_t i = 0; i < run.count; ++i) {
          EXPECT_EQ(slice.global_index(run.begin + i), run.global + i);
          owned[{store.mesh().at().dp_replicate, slice.weight->name()}].insert(run.global + i);
        }
        at += run.count;
      });
      EXPECT_EQ(at, slice.count());
    }
    // What another rank says of this one is what this one says.
    int64_t all = 0;
    for (int rank = 0; rank < dims().world_size; ++rank) {
      for (const Slice& slice : store.slices_of(coordinates_of(dims(), rank))) all += slice.count();
    }
    EXPECT_EQ(all, dims().dp_replicate * store.parameters());
  });
  for (const auto& [key, elements] : owned) {
    const int64_t n = key.second == "rows"     ? 210
                      : key.second == "cols"   ? 360
                      : key.second == "shared" ? 120
                                               : 30;
    ASSERT_EQ(static_cast<int64_t>(elements.size()), n) << key.second;
    EXPECT_EQ(*elements.rbegin(), n - 1);
    EXPECT_EQ(std::set<int64_t>(elements.begin(), elements.end()).size(), elements.size()) << key.second;
  }
}

TEST_P(Ranks, InitAndUnshardGiveTheWeightsOfOneRank) {
  const auto alone = table_of(0, 1);
  ParamStore one(*alone, 1,
                 {.dtypes = {.compute = at::kBFloat16}, .frozen = {}, .mesh = {}, .pp_of_block = {}});
  one.init(3);
  for (const auto& unit : one.units()) unit->unshard();
  on_ranks(dims(),
           [&](ParamStore& store) {
             store.init(3);
             for (int round = 0; round < 2; ++round) {
               for (const auto& unit : store.units()) unit->start_unshard();
               for (const auto& unit : store.units()) unit->finish_unshard();
               for (const auto& weight : store.table().weights()) {
                 at::Tensor want = one.weight(weight->name()).value();
                 const TpPart& part = weight->parts()[weight->tp()];
                 if (weight->split() != Split::kWhole)
                   want = want.narrow(weight->split() == Split::kRows ? 0 : 1, part.begin,
                                      part.end - part.begin);
                 EXPECT_TRUE(at::equal(weight->value(), want)) << weight->name();
               }
               for (const auto& unit : store.units()) unit->reshard(/*keep_memory=*/round == 0);
             }
           },
           {.compute = at::kBFloat16});
}

// Each rank adds its rank + 1 to every element, twice, with a reduction after each.
TEST_P(Ranks, ReductionsAddUpAndSumEveryContribution) {
  on_ranks(dims(), [&](ParamStore& store) {
    store.zero_grad();
    for (int plan = 0; plan < 2; ++plan) {
      for (const auto& weight : store.table().weights()) {
        weight->accumulate([&](const at::Tensor& sink) { sink.add_(store.mesh().rank() + 1); });
      }
      for (const auto& unit : store.units()) unit->start_reduce();
      for (const auto& unit : store.units()) unit->finish_reduce();
    }
    for (const Slice& slice : store.slices()) {
      const TpPart& part = slice.weight->parts()[slice.tp];
      double want = 0;
      for (int rank = 0; rank < dims().world_size; ++rank) {
        const int tp = coordinates_of(dims(), rank).tp;
        if (tp >= part.holders_begin && tp < part.holders_end) want += 2 * (rank + 1);
      }
      EXPECT_TRUE((slice.of(slice.unit->grad_shard()) == want).all().item<bool>()) << slice.weight->name();
    }
    double gaps = 0;  // stay zero: the norm is over the whole shard
    for (const auto& unit : store.units()) gaps += unit->grad_shard().sum().item<double>();
    double weights = 0;
    for (const Slice& slice : store.slices())
      weights += slice.of(slice.unit->grad_shard()).sum().item<double>();
    EXPECT_EQ(gaps, weights);
  });
}

// A rank that had no work for a unit still takes part.
TEST_P(Ranks, AReductionNeedsNoContribution) {
  on_ranks(dims(), [&](ParamStore& store) {
    const Weight& norm = store.weight("norm");
    if (store.mesh().rank() == 0) norm.accumulate([](const at::Tensor& sink) { sink.add_(3); });
    norm.unit().reduce();
    for (const Slice& slice : store.slices()) {
      if (slice.weight != &norm) continue;
      EXPECT_TRUE((slice.of(slice.unit->grad_shard()) == 3).all().item<bool>());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Meshes, Ranks,
                         testing::Values(std::tuple(1, 1, 1), std::tuple(1, 2, 1), std::tuple(1, 3, 1),
                                         std::tuple(2, 1, 1), std::tuple(2, 2, 1), std::tuple(1, 1, 2),
                                         std::tuple(1, 2, 2), std::tuple(2, 2, 2)));

}  // namespace
}  // namespace titanium
