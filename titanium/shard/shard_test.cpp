#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "titanium/base/error.h"
#include "titanium/shard/param_store.h"

namespace titanium {
namespace {

WeightTable table_of_two_blocks() {
  WeightTable table;
  const Weight* embed = table.add("embed", {10, 8}, Split::kRows, {}, 0);
  table.add("a", {3, 8}, Split::kRows, {}, 1);
  table.add("b", {5, 8}, Split::kRows, {}, 1);
  table.add("norm", {8}, Split::kWhole, {Init::kOnes}, 1);
  table.share(embed, 2);
  table.add("final", {8}, Split::kWhole, {Init::kOnes}, 2);
  return table;
}

TEST(ParamStore, EveryWeightHasOneOwnerAndAlignedPlace) {
  WeightTable table = table_of_two_blocks();
  ParamStore store(table, 3, {});
  EXPECT_EQ(store.units().size(), 3u);
  EXPECT_EQ(store.parameters(), 80 + 24 + 40 + 8 + 8);
  EXPECT_EQ(store.units_of_block(0), (std::vector<int>{0}));
  EXPECT_EQ(store.units_of_block(2), (std::vector<int>{0, 2}));  // the tied matrix is used by two blocks
  int64_t owned = 0;
  for (const Slice& slice : store.slices()) {
    EXPECT_EQ(slice.weight->offset() % Unit::kAlign, 0);
    owned += slice.end - slice.begin;
  }
  EXPECT_EQ(owned, store.parameters());
}

TEST(ParamStore, InitIsAFunctionOfSeedAndNameAlone) {
  WeightTable one = table_of_two_blocks();
  ParamStore a(one, 3, {});
  a.init(1);
  WeightTable other;  // the same weight in another place of another table
  other.add("x", {7}, Split::kWhole, {}, 0);
  other.add("b", {5, 8}, Split::kRows, {}, 0);
  ParamStore b(other, 1, {});
  b.init(1);
  a.weight("b").unit().unshard();
  b.weight("b").unit().unshard();
  EXPECT_TRUE(at::equal(a.weight("b").value(), b.weight("b").value()));
  EXPECT_NEAR(a.weight("b").value().std().item<double>(), 0.02, 0.008);
  a.weight("final").unit().unshard();
  EXPECT_TRUE(at::equal(a.weight("final").value(), at::ones({8})));
  const at::Tensor before = a.weight("b").value().clone();
  a.init(2);
  a.weight("b").unit().unshard();
  EXPECT_FALSE(at::equal(a.weight("b").value(), before));
}

TEST(Unit, CastsOnUnshardAndRefusesUseBefore) {
  WeightTable table = table_of_two_blocks();
  StoreOptions options;
  options.dtypes.compute = at::kBFloat16;
  ParamStore store(table, 3, options);
  store.init(1);
  const Weight& a = store.weight("a");
  EXPECT_THROW(a.value(), Bug);
  a.unit().unshard();
  EXPECT_EQ(a.value().scalar_type(), at::kBFloat16);
  const at::Tensor master = a.unit().shard().narrow(0, a.offset(), a.numel()).view({3, 8});
  EXPECT_TRUE(at::equal(a.value(), master.to(at::kBFloat16)));
  master.fill_(3);  // stale until the writer says so
  a.unit().unshard();
  EXPECT_FALSE(at::equal(a.value(), master.to(at::kBFloat16)));
  a.unit().written();
  a.unit().unshard();
  EXPECT_TRUE(at::equal(a.value(), master.to(at::kBFloat16)));
  a.unit().reshard(/*keep_memory=*/false);
  EXPECT_THROW(a.value(), Bug);
}

TEST(StackedRows, IsAViewWhenDenseAndACopyWhenNot) {
  WeightTable table;
  const Weight* q = table.add("q", {4, 16}, Split::kRows, {}, 0);  // 64 elements: k follows without a gap
  const Weight* k = table.add("k", {2, 16}, Split::kRows, {}, 0);
  const Weight* v = table.add("v", {2, 16}, Split::kRows, {}, 0);  // a gap of 32 before it
  const Handle* dense = table.stack({q, k});
  const Handle* sparse = table.stack({q, k, v});
  ParamStore store(table, 1, {});
  store.init(1);
  store.unit(0).unshard();
  EXPECT_EQ(dense->value().data_ptr(), q->value().data_ptr());
  EXPECT_TRUE(at::equal(dense->value(), at::cat({q->value(), k->value()})));
  EXPECT_TRUE(at::equal(sparse->value(), at::cat({q->value(), k->value(), v->value()})));
  const at::Tensor grad = at::arange(128).view({8, 16}).to(at::kFloat);
  sparse->accumulate([&](const at::Tensor& sink) { sink.add_(grad); });
  dense->accumulate([&](const at::Tensor& sink) { sink.add_(1); });
  EXPECT_TRUE(at::equal(store.unit(0).grad_view(q->offset(), {4, 16}), grad.narrow(0, 0, 4) + 1));
  EXPECT_TRUE(at::equal(store.unit(0).grad_view(k->offset(), {2, 16}), grad.narrow(0, 4, 2) + 1));
  EXPECT_TRUE(at::equal(store.unit(0).grad_view(v->offset(), {2, 16}), grad.narrow(0, 6, 2)));
}

TEST(ParamStore, FrozenWeightsFormAUnitWithoutGradient) {
  WeightTable table = table_of_two_blocks();
  StoreOptions options;
  options.frozen = [](const std::string& name) { return name == "a"; };
  ParamStore store(table, 3, options);
  EXPECT_FALSE(store.weight("a").trainable());
  EXPECT_TRUE(store.weight("b").trainable());
  EXPECT_NE(&store.weight("a").unit(), &store.weight("b").unit());
  store.weight("a").accumulate(
      [](const at::Tensor&) { FAIL() << "a frozen weight was asked for its gradient"; });
  store.zero_grad();
  EXPECT_FALSE(store.weight("a").unit().has_grad());
  EXPECT_TRUE(store.weight("b").unit().has_grad());
}

TEST(ParamStore, WritersAnnounceThemselves) {
  WeightTable table = table_of_two_blocks();
  ParamStore store(table, 3, {});
  std::vector<std::string> told;
  store.set_write_hook([&](Unit& unit) { told.push_back(unit.name()); });
  store.init(1);
  EXPECT_EQ(told.size(), 5u);  // once a weight
}

}  // namespace
}  // namespace titanium
