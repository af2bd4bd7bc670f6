// For the tests of this room on many ranks: a model that tensor parallelism cuts unevenly, whose every
// element is a function of (name, element), so that each rank knows what it must hold.
#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "titanium/base/random.h"
#include "titanium/dist/run_ranks.h"
#include "titanium/optim/optimizer.h"
#include "titanium/weights/manifest.h"

namespace titanium::testing {

struct Layout {
  int replicate = 1, shard = 1, tp = 1;
  std::vector<int> pp_of_block = {};  // of the four blocks, of which the first and the last are tied
  int pp() const {
    return pp_of_block.empty() ? 1 : 1 + *std::max_element(pp_of_block.begin(), pp_of_block.end());
  }
  int ranks() const { return replicate * shard * tp * pp(); }
  ParallelDims dims() const {
    return {.dp_replicate = replicate, .dp_shard = shard, .tp = tp, .pp = pp(), .world_size = ranks()};
  }
  friend void PrintTo(const Layout& l, std::ostream* out) {
    *out << "replicate " << l.replicate << " shard " << l.shard << " tp " << l.tp;
    for (const int pp : l.pp_of_block) *out << (&pp == l.pp_of_block.data() ? " pp " : ",") << pp;
  }
};

inline const std::vector<Layout> kLayouts = {{1, 1, 1},
                                             {1, 2, 1},
                                             {1, 3, 1},
                                             {1, 4, 1},
                                             {2, 2, 1},
                                             {1, 1, 2},
                                             {1, 1, 3},
                                             {1, 2, 2},
                                             {2, 1, 2},
                                             {1, 2, 3},
                                             {1, 1, 1, {0, 0, 1, 1}},
                                             {1, 1, 1, {0, 1, 1, 0}},
                                             {1, 1, 1, {0, 1, 2, 3}},
                                             {1, 2, 1, {0, 0, 1, 1}},
                                             {2, 1, 2, {0, 1, 1, 0}},
                                             {1, 2, 2, {0, 0, 0, 1}}};

class ToyRank {
 public:
  ToyRank(const Layout& layout, std::shared_ptr<World> world, StoreDtypes dtypes = {}, int64_t large_rows = 0)
      : mesh(layout.dims(), std::move(world)), table(mesh.at().tp, layout.tp), tp_(layout.tp) {
    const Weight* embed = add("model.embed_tokens.weight", {50, 24}, Split::kRows, {30}, {17, 34}, 0);
    add("q.weight", {18, 24}, Split::kRows, {12}, {6, 12}, 1);
    std::vector<TpPart> pairs;  // two of three ranks hold the same
    if (tp_ == 2) pairs = {{0, 2, 0, 1}, {2, 4, 1, 2}};
    if (tp_ == 3) pairs = {{0, 2, 0, 2}, {0, 2, 0, 2}, {2, 4, 2, 3}};
    table.add("k.weight", {4, 24}, Split::kRows, {}, 1, pairs);
    add("q.bias", {18}, Split::kRows, {12}, {6, 12}, 1);
    add("o.weight", {24, 18}, Split::kCols, {12}, {6, 12}, 1);
    table.add("norm.weight", {24}, Split::kWhole, {}, 1);
    add("down.weight", {24, 50}, Split::kCols, {29}, {17, 34}, 2);
    table.add("fixed", {3, 5, 7}, Split::kWhole, {}, 2);
    table.add("model.norm.weight", {24}, Split::kWhole, {}, 3);
    if (large_rows > 0) {
      add("large.weight", {large_rows, 1000}, Split::kCols, {600}, {334, 667}, 2);
      add("wide.weight", {large_rows, 1000}, Split::kRows, {large_rows / 2}, {large_rows / 3, large_rows / 2},
          2);
    }
    table.share(embed, 3);
    StoreOptions options;
    options.dtypes = dtypes;
    options.mesh = mesh;
    options.pp_of_block = layout.pp_of_block;
    options.frozen = [](const std::string& name) { return name == "fixed"; };
    store = std::make_unique<ParamStore>(table, 4, options);
    optimizer = make_optimizer(*store, {});
  }

  static float value(const std::string& name, const std::string& state, int64_t i) {
    const uint64_t key = hash_name(name.data(), name.size()) ^ hash_name(state.data(), state.size());
    return static_cast<float>((key + static_cast<uint64_t>(i) * 2654435761u) % 1000003) * 6e-6f - 3;
  }

  // Masters, state of what trains, and the count of updates.
  void fill() {
    each([&](const Slice& slice, const std::string& state) {
      store->before_write(*slice.unit);
      slice.of(tensor(slice, state, true)).copy_(wanted(slice, state));
    });
    for (const auto& unit : store->units()) {
      unit->written();
      if (!unit->trainable()) continue;
      for (const std::string& state : optimizer->state_names()) optimizer->make_state(*unit, state);
    }
    optimizer->set_updates(7);
  }
  void spoil() {
    each([&](const Slice& slice, const std::string& state) {
      store->before_write(*slice.unit);
      slice.of(tensor(slice, state, true)).fill_(5);
    });
    for (const auto& unit : store->units()) unit->written();
    optimizer->set_updates(1);
  }
  // What is not as fill() leaves it; empty when all is.
  std::string wrong(bool masters_only = false) {
    std::string found;
    each([&](const Slice& slice, const std::string& state) {
      if (masters_only && state != kMaster) return;
      const at::Tensor flat = tensor(slice, state, false);
      if (!flat.defined() || !at::equal(slice.of(flat), wanted(slice, state)))
        found += state + " of " + slice.weight->name() + "; ";
    });
    if (!masters_only && optimizer->updates() != 7) found += "updates; ";
    return found;
  }
  int64_t owned() const {  // elements
    int64_t n = 0;
    for (const Slice& slice : store->slices()) n += slice.count();
    return n;
  }

  Mesh mesh;
  WeightTable table;
  std::unique_ptr<ParamStore> store;
  std::unique_ptr<Optimizer> optimizer;

 private:
  // Cut for two ranks at `two`, for three at `three`.
  const Weight* add(const std::string& name, std::vector<int64_t> shape, Split split,
                    std::vector<int64_t> two, std::vector<int64_t> three, int block) {
    std::vector<TpPart> parts;
    std::vector<int64_t> cuts = tp_ == 2 ? std::move(two) : std::move(three);
    cuts.insert(cuts.begin(), 0);
    cuts.push_back(split == Split::kCols ? shape[1] : shape[0]);
    for (int i = 0; tp_ > 1 && i < tp_; ++i) parts.push_back({cuts[i], cuts[i + 1], i, i + 1});
    return table.add(name, std::move(shape), split, {}, block, parts);
  }
  void each(const std::function<void(const Slice&, const std::string&)>& visit) {
    for (const Slice& slice : store->slices()) {
      visit(slice, kMaster);
      if (!slice.unit->trainable()) continue;
      for (const std::string& state : optimizer->state_names()) visit(slice, state);
    }
  }
  at::Tensor tensor(const Slice& slice, const std::string& state, bool make) {
    if (state == kMaster) return slice.unit->shard();
    return make ? optimizer->make_state(*slice.unit, state) : optimizer->state(*slice.unit, state);
  }
  at::Tensor wanted(const Slice& slice, const std::string& state) {
    at::Tensor values = at::empty({slice.count()});
    auto* out = values.data_ptr<float>();
    for (int64_t i = 0; i < slice.count(); ++i)
      out[i] = value(slice.weight->name(), state, slice.global_index(i));
    return values.to(tensor(slice, state, true).scalar_type());
  }

  int tp_;
};

// As every rank of the layout, each with a model of its own.
inline void on_ranks(const Layout& layout, const std::function<void(ToyRank&)>& work, StoreDtypes dtypes = {},
                     int64_t large_rows = 0) {
  run_ranks(layout.ranks(), [&](std::shared_ptr<World> world) {
    ToyRank rank(layout, std::move(world), dtypes, large_rows);
    work(rank);
  });
}

}  // namespace titanium::testing
