// Flash attention (Dao, "FlashAttention-2", 2023) on tiles that hold keys down and queries across: the scores
// of a tile are S^T = K Q^T, its output O^T = V^T P^T.  The G = N / K heads that share a key head lie side by
// side, query by query: column r of a document is query r / G of head r % G.
//
// A column meets the key blocks of its document in order, block j always being keys 64 j ... 64 j + 63, and
// keys that it does not see add exact zeros.  So its bits depend on its own keys alone, not on its place in a
// tile, a pack or a decode. In backward a unit is a run of the columns of one document and key head; the runs
// are a function of the shape, and their sums are added in order.  Threads only pick up units.
#include "titanium/ops/attention_kernel.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "titanium/ops/attention_tiles.h"
#include "titanium/ops/tile_pack.h"

namespace titanium {
namespace {

constexpr double kLog2E = 1.44269504088896340736, kLn2 = 0.69314718055994530942;

template <typename T>
struct Free {
  void operator()(T* p) const { std::free(p); }
};
template <typename T>
using Buffer = std::unique_ptr<T[], Free<T>>;

// Uninitialised, on a cache line.
template <typename T>
Buffer<T> make_buffer(int64_t n) {
  const size_t bytes = (static_cast<size_t>(n) * sizeof(T) + 127) / 64 * 64;
  T* p = static_cast<T*>(std::aligned_alloc(64, bytes));
  if (p == nullptr) throw std::bad_alloc();
  return Buffer<T>(p);
}

// Calls make() once a thread and work(its result, i) for i in [0, n), whoever is free taking the next.
template <typename Make, typename Work>
void share_out(int64_t n, const Make& make, const Work& work) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(n, at::get_num_threads()), 1, [&](int64_t, int64_t) {
    auto scratch = make();
    for (int64_t i = next++; i < n; i = next++) work(scratch, i);
    release_tiles();
  });
}

struct Document {
  int64_t q0, k0, queries, keys;
  int64_t first_block;  // number of key blocks in the documents before
  int64_t blocks() const { return (keys + kKeys - 1) / kKeys; }
};

struct Tile {
  int64_t doc, key_head, column;  // first column
  int used, width;
  int64_t from, to;  // key blocks that some column sees
  int64_t cost() const { return (to - from) * width; }
};

class Layout {
 public:
  explicit Layout(const AttentionShape& shape) : shape_(shape), G(shape.N / shape.K) {
    for (size_t d = 0; d + 1 < shape.q_bounds.size(); ++d) {
      const int64_t first_key = shape.k_starts.empty() ? shape.k_bounds[d] : shape.k_starts[d];
      documents.push_back({shape.q_bounds[d], first_key, shape.q_bounds[d + 1] - shape.q_bounds[d],
                           shape.k_bounds[d + 1] - shape.k_bounds[d], blocks});
      blocks += documents.back().blocks();
    }
    Tq = shape.q_bounds.back();
  }

  // The tiles of one document and key head, in order.  `narrowest` is the least width.
  std::vector<Tile> tiles(int64_t doc, int64_t key_head, int narrowest) const {
    const Document& d = documents[doc];
    std::vector<Tile> result;
    for (int64_t column = 0; column < d.queries * G; column += kColumns) {
      Tile tile{doc, key_head, column, 0, narrowest, 0, 0};
      tile.used = static_cast<int>(std::min<int64_t>(kColumns, d.queries * G - column));
      while (tile.width < tile.used) tile.width *= 2;
      const int64_t last = (column + tile.used - 1) / G;
      tile.from = low(d, column / G) / kKeys;
      tile.to = (high(d, last) + kKeys - 1) / kKeys;
      result.push_back(tile);
    }
    return result;
  }

  // Query `query` of a document sees its keys [low, high).
  int64_t high(const Document& d, int64_t query) const { return d.keys - d.queries + query + 1; }
  int64_t low(const Document& d, int64_t query) const {
    return shape_.window > 0 ? std::max<int64_t>(0, high(d, query) - shape_.window) : 0;
  }

 private:
  const AttentionShape& shape_;

 public:
  int64_t G;
  std::vector<Document> documents;
  int64_t blocks = 0, Tq = 0;
};

// What the columns of a tile see.
struct Sight {
  int64_t low[kColumns] = {}, high[kColumns] = {};
  int64_t max_low = 0, min_high = 0;

  Sight(const Layout& layout, const Tile& tile) {
    const Document& d = layout.documents[tile.doc];
    for (int c = 0; c < tile.width; ++c) {
      const int64_t query = (tile.column + std::min(c, tile.used - 1)) / layout.G;
      low[c] = layout.low(d, query);
      high[c] = layout.high(d, query);
    }
    max_low = low[tile.width - 1];
    min_high = high[0];
  }

  template <typename A>
  void apply(int width, int64_t block, A* scores) const {
    const int64_t first = block * kKeys;
    alignas(64) A bound[kColumns];
    const auto relative = [&](const int64_t* keys) {
      for (int c = 0; c < width; ++c)
        bound[c] = static_cast<A>(std::clamp<int64_t>(keys[c] - first, 0, kKeys));
      return bound;
    };
    if (max_low > first) hide_before(width, relative(low), scores);
    if (min_high < first + kKeys) hide_from(width, relative(high), scores);
  }
};

// The rows of a packed tensor [T, heads, H] that the columns of a tile or the keys of a block stand for;
// zeros beyond.
template <typename T>
struct Rows {
  T* at[kColumns];

  static Rows columns(const Layout& layout, const AttentionShape& s, const Tile& tile, T* base, T* zeros) {
    Rows rows;
    const Document& d = layout.documents[tile.doc];
    for (int c = 0; c < tile.width; ++c) {
      const int64_t query = (tile.column + c) / layout.G,
                    head = tile.key_head * layout.G + (tile.column + c) % layout.G;
      rows.at[c] = c < tile.used ? base + ((d.q0 + query) * s.N + head) * s.H : zeros;
    }
    return rows;
  }
  static Rows keys(const Layout& layout, const AttentionShape& s, int64_t doc, int64_t key_head,
                   int64_t block, T* base, T* zeros) {
    Rows rows;
    const Document& d = layout.documents[doc];
    for (int i = 0; i < kKeys; ++i) {
      const int64_t key = block * kKeys + i;
      rows.at[i] = key < d.keys ? base + ((d.k0 + key) * s.K + key_head) * s.H : zeros;
    }
    return rows;
  }
};
static_assert(kKeys == kColumns);

// [kKeys][H]
template <typename T>
void pack_plain(int64_t H, const Rows<const T>& rows, T* to) {
  for (int i = 0; i < kKeys; ++i) std::memcpy(to + i * H, rows.at[i], sizeof(T) * H);
}

template <typename T>
struct ForwardScratch {
  explicit ForwardScratch(int64_t H)
      : zeros(make_buffer<T>(H)),
        key(make_buffer<T>(kKeys * H)),
        value(make_buffer<T>(kKeys * H)),
        query(make_buffer<T>(kColumns * H)),
        weights(make_buffer<T>(kKeys * kColumns)),
        scores(make_buffer<Wide<T>>(kKeys * kColumns)),
        sums(make_buffer<Wide<T>>(kColumns * H)) {
    std::fill_n(zeros.get(), H, T(0));
  }
  Buffer<T> zeros, key, value, query, weights;
  Buffer<Wide<T>> scores, sums;
};

}  // namespace

template <typename T>
void attention_forward(const AttentionShape& s, const T* q, const T* k, const T* v, T* out, Wide<T>* lse) {
  using A = Wide<T>;
  const Layout layout(s);
  const int H = static_cast<int>(s.H);
  const auto scratch = [&] { return std::make_unique<ForwardScratch<T>>(H); };
  const A scale2 = static_cast<A>(s.scale * kLog2E);

  // Keys and transposed values are packed once where several tiles use them, else by the tile itself.
  std::vector<Tile> tiles;
  std::vector<char> is_packed(layout.documents.size());
  std::vector<std::array<int64_t, 3>> to_pack;  // document, key head, block
  for (int64_t doc = 0; doc < static_cast<int64_t>(layout.documents.size()); ++doc)
    for (int64_t key_head = 0; key_head < s.K; ++key_head) {
      const std::vector<Tile> some = layout.tiles(doc, key_head, 16);
      tiles.insert(tiles.end(), some.begin(), some.end());
      is_packed[doc] = some.size() > 2;
      for (int64_t j = 0; is_packed[doc] && j < layout.documents[doc].blocks(); ++j)
        to_pack.push_back({doc, key_head, j});
    }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [](const Tile& a, const Tile& b) { return a.cost() > b.cost(); });

  Buffer<T> keys, values;
  const int64_t block_size = static_cast<int64_t>(kKeys) * H;
  const auto place = [&](int64_t doc, int64_t key_head, int64_t j) {
    return (key_head * layout.blocks + layout.documents[doc].first_block + j) * block_size;
  };
  if (!to_pack.empty()) {
    keys = make_buffer<T>(s.K * layout.blocks * block_size);
    values = make_buffer<T>(s.K * layout.blocks * block_size);
    share_out(to_pack.size(), scratch, [&](auto& w, int64_t i) {
      const auto [doc, key_head, j] = to_pack[i];
      const int64_t at = place(doc, key_head, j);
      pack_plain<T>(H, Rows<const T>::keys(layout, s, doc, key_head, j, k, w->zeros.get()), keys.get() + at);
      pack_transposed(kKeys, H, Rows<const T>::keys(layout, s, doc, key_head, j, v, w->zeros.get()).at,
                      values.get() + at);
    });
  }

  share_out(tiles.size(), scratch, [&](auto& w, int64_t index) {
    const Tile& tile = tiles[index];
    const int width = tile.width;
    const Sight sight(layout, tile);
    const T* zeros = w->zeros.get();
    pack_columns(width, H, Rows<const T>::columns(layout, s, tile, q, zeros).at, w->query.get());
    Running<A> running;
    std::fill_n(running.max, width, -kInfinity<A>);
    std::fill_n(running.sum, width, A(0));

    for (int64_t j = tile.from; j < tile.to; ++j) {
      const T *key = w->key.get(), *value = w->value.get();
      if (is_packed[tile.doc]) {
        const int64_t at = place(tile.doc, tile.key_head, j);
        key = keys.get() + at;
        value = values.get() + at;
      } else {
        pack_plain<T>(H, Rows<const T>::keys(layout, s, tile.doc, tile.key_head, j, k, zeros), w->key.get());
        pack_transposed(kKeys, H, Rows<const T>::keys(layout, s, tile.doc, tile.key_head, j, v, zeros).at,
                        w->value.get());
      }
      tile_gemm(kKeys, width, H, key, w->query.get(), w->scores.get(), false);
      sight.apply(width, j, w->scores.get());
      const bool rescale = softmax_step(width, w->scores.get(), scale2, running, w->weights.get());
      if (rescale && j > tile.from) scale_columns(H, width, running.shrink, w->sums.get());
      tile_gemm(H, width, kKeys, value, w->weights.get(), w->sums.get(), j > tile.from);
    }

    const Document& d = layout.documents[tile.doc];
    for (int c = 0; c < tile.used; ++c) {
      const int64_t column = tile.column + c, head = tile.key_head * layout.G + column % layout.G;
      lse[head * layout.Tq + d.q0 + column / layout.G] =
          running.max[c] * static_cast<A>(kLn2) + std::log(running.sum[c]);
      running.sum[c] = 1 / running.sum[c];
    }
    unpack_columns(tile.used, width, H, w->sums.get(), running.sum,
                   Rows<T>::columns(layout, s, tile, out, nullptr).at);
  });
}

namespace {

// A run of the tiles of one document and key head, with sums of its own over the key blocks [from, to).
struct Unit {
  std::vector<Tile> tiles;
  int64_t from = 0, to = 0, place = 0;
  int64_t cost = 0;
};

// Runs of about equal cost: one for each kColumnsPerUnit columns, but four at most, because the sums take
// memory.
constexpr int64_t kColumnsPerUnit = 1024, kMostUnits = 4;

std::vector<Unit> cut(const std::vector<Tile>& tiles) {
  int64_t total = 0, done = 0;
  for (const Tile& tile : tiles) total += tile.cost();
  const int64_t count = std::clamp<int64_t>(tiles.size() * kColumns / kColumnsPerUnit, 1, kMostUnits);
  std::vector<Unit> units;
  for (const Tile& tile : tiles) {
    if (units.empty() || done * count >= total * static_cast<int64_t>(units.size())) {
      units.emplace_back();
      units.back().from = tile.from;
    }
    Unit& unit = units.back();
    unit.tiles.push_back(tile);
    unit.to = tile.to;
    unit.cost += tile.cost();
    done += tile.cost();
  }
  return units;
}

template <typename T>
struct BackwardScratch {
  explicit BackwardScratch(int64_t H)
      : zeros(make_buffer<T>(H)),
        query_columns(make_buffer<T>(kColumns * H)),
        query_rows(make_buffer<T>(kColumns * H)),
        grad_columns(make_buffer<T>(kColumns * H)),
        grad_rows(make_buffer<T>(kColumns * H)),
        weights(make_buffer<T>(kKeys * kColumns)),
        d_scores(make_buffer<T>(kKeys * kColumns)),
        d_scores_paired(make_buffer<T>(kKeys * kColumns)),
        scores(make_buffer<Wide<T>>(kKeys * kColumns)),
        d_weights(make_buffer<Wide<T>>(kKeys * kColumns)),
        dq(make_buffer<Wide<T>>(kColumns * H)) {
    std::fill_n(zeros.get(), H, T(0));
  }
  Buffer<T> zeros, query_columns, query_rows, grad_columns, grad_rows, weights, d_scores, d_scores_paired;
  Buffer<Wide<T>> scores, d_weights, dq;
};

template <typename T>
TITANIUM_INLINE Wide<T> dot_of(int64_t H, const T* a, const T* b) {
  using A = Wide<T>;
  Vector<A> sum = {};
  for (int64_t h = 0; h < H; h += kLanes<A>) sum += load_wide(a + h) * load_wide(b + h);
  A total = 0;
  for (int lane = 0; lane < kLanes<A>; ++lane) total += sum[lane];
  return total;
}
TITANIUM_CLONES float dot(int64_t H, const at::BFloat16* a, const at::BFloat16* b) {
  return dot_of(H, a, b);
}
TITANIUM_CLONES float dot(int64_t H, const float* a, const float* b) {
  return dot_of(H, a, b);
}
TITANIUM_CLONES double dot(int64_t H, const double* a, const double* b) {
  return dot_of(H, a, b);
}

// to [H] = scale * the sum of parts, in order.
template <typename T>
TITANIUM_INLINE void add_parts_of(int64_t H, const std::vector<const Wide<T>*>& parts, Wide<T> scale, T* to) {
  using A = Wide<T>;
  for (int64_t h = 0; h < H; h += kLanes<A>) {
    Vector<A> sum = {};
    for (const A* part : parts) sum += load(part + h);
    store_narrow(to + h, sum * scale);
  }
}
TITANIUM_CLONES void add_parts(int64_t H, const std::vector<const float*>& parts, float scale,
                               at::BFloat16* to) {
  add_parts_of(H, parts, scale, to);
}
TITANIUM_CLONES void add_parts(int64_t H, const std::vector<const float*>& parts, float scale, float* to) {
  add_parts_of(H, parts, scale, to);
}
TITANIUM_CLONES void add_parts(int64_t H, const std::vector<const double*>& parts, double scale, double* to) {
  add_parts_of(H, parts, scale, to);
}

}  // namespace

template <typename T>
void attention_backward(const AttentionShape& s, const T* q, const T* k, const T* v, const T* out,
                        const Wide<T>* lse, const T* d_out, T* dq, T* dk, T* dv) {
  using A = Wide<T>;
  const Layout layout(s);
  const int H = static_cast<int>(s.H);
  const auto scratch = [&] { return std::make_unique<BackwardScratch<T>>(H); };
  const A scale = static_cast<A>(s.scale), scale2 = static_cast<A>(s.scale * kLog2E);
  const int64_t block_size = static_cast<int64_t>(kKeys) * H;

  struct Group {  // a document and key head
    int64_t doc, key_head, first_unit, units;
  };
  std::vector<Group> groups;
  std::vector<Unit> units;
  std::vector<std::array<int64_t, 2>> blocks;  // group, key block
  int64_t sums_size = 0;
  for (int64_t doc = 0; doc < static_cast<int64_t>(layout.documents.size()); ++doc)
    for (int64_t key_head = 0; key_head < s.K; ++key_head) {
      std::vector<Unit> some = cut(layout.tiles(doc, key_head, 32));
      for (Unit& unit : some) {
        unit.place = sums_size;
        sums_size += 2 * (unit.to - unit.from) * block_size;
      }
      for (int64_t j = 0; j < layout.documents[doc].blocks(); ++j)
        blocks.push_back({static_cast<int64_t>(groups.size()), j});
      groups.push_back(
          {doc, key_head, static_cast<int64_t>(units.size()), static_cast<int64_t>(some.size())});
      units.insert(units.end(), std::make_move_iterator(some.begin()), std::make_move_iterator(some.end()));
    }

  const Buffer<T> keys = make_buffer<T>(s.K * layout.blocks * block_size),
                  keys_transposed = make_buffer<T>(s.K * layout.blocks * block_size),
                  values = make_buffer<T>(s.K * layout.blocks * block_size);
  const Buffer<A> sums = make_buffer<A>(sums_size);
  const auto place = [&](int64_t doc, int64_t key_head, int64_t j) {
    return (key_head * layout.blocks + layout.documents[doc].first_block + j) * block_size;
  };
  share_out(blocks.size(), scratch, [&](auto& w, int64_t i) {
    const Group& group = groups[blocks[i][0]];
    const int64_t j = blocks[i][1], at = place(group.doc, group.key_head, j);
    const auto key = Rows<const T>::keys(layout, s, group.doc, group.key_head, j, k, w->zeros.get());
    pack_plain<T>(H, key, keys.get() + at);
    pack_transposed(kKeys, H, key.at, keys_transposed.get() + at);
    pack_plain<T>(H, Rows<const T>::keys(layout, s, group.doc, group.key_head, j, v, w->zeros.get()),
                  values.get() + at);
  });

  std::vector<int64_t> order(units.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return units[a].cost > units[b].cost; });

  share_out(units.size(), scratch, [&](auto& w, int64_t index) {
    const Unit& unit = units[order[index]];
    A* const d_key = sums.get() + unit.place;
    A* const d_value = d_key + (unit.to - unit.from) * block_size;
    std::fill_n(d_key, 2 * (unit.to - unit.from) * block_size, A(0));
    for (const Tile& tile : unit.tiles) {
      const int width = tile.width;
      const Document& d = layout.documents[tile.doc];
      const Sight sight(layout, tile);
      const auto query = Rows<const T>::columns(layout, s, tile, q, w->zeros.get());
      const auto grad = Rows<const T>::columns(layout, s, tile, d_out, w->zeros.get());
      const auto result = Rows<const T>::columns(layout, s, tile, out, w->zeros.get());
      pack_columns(width, H, query.at, w->query_columns.get());
      pack_rows(width, H, query.at, w->query_rows.get());
      pack_columns(width, H, grad.at, w->grad_columns.get());
      pack_rows(width, H, grad.at, w->grad_rows.get());
      alignas(64) A lse2[kColumns], delta[kColumns], factor[kColumns];
      for (int c = 0; c < width; ++c) {
        const int64_t column = tile.column + c, head = tile.key_head * layout.G + column % layout.G;
        lse2[c] = kInfinity<A>;  // a column that is not there: its weights come out as zero
        if (c < tile.used)
          lse2[c] = lse[head * layout.Tq + d.q0 + column / layout.G] * static_cast<A>(kLog2E);
        delta[c] = dot(H, grad.at[c], result.at[c]);
        factor[c] = scale;
      }

      for (int64_t j = tile.from; j < tile.to; ++j) {
        const int64_t at = place(tile.doc, tile.key_head, j), sum_at = (j - unit.from) * block_size;
        tile_gemm(kKeys, width, H, keys.get() + at, w->query_columns.get(), w->scores.get(), false);
        sight.apply(width, j, w->scores.get());
        tile_gemm(kKeys, width, H, values.get() + at, w->grad_columns.get(), w->d_weights.get(), false);
        gradient_step(width, w->scores.get(), w->d_weights.get(), scale2, lse2, delta, w->weights.get(),
                      w->d_scores.get(), w->d_scores_paired.get());
        tile_gemm(kKeys, H, width, w->weights.get(), w->grad_rows.get(), d_value + sum_at, true);
        tile_gemm(kKeys, H, width, w->d_scores.get(), w->query_rows.get(), d_key + sum_at, true);
        const T* paired = kPair<T> == 2 ? w->d_scores_paired.get() : w->d_scores.get();
        tile_gemm(H, width, kKeys, keys_transposed.get() + at, paired, w->dq.get(), j > tile.from);
      }
      unpack_columns(tile.used, width, H, w->dq.get(), factor,
                     Rows<T>::columns(layout, s, tile, dq, nullptr).at);
    }
  });

  share_out(
      blocks.size(), [] { return std::vector<const A*>(); },
      [&](std::vector<const A*>& parts, int64_t i) {
        const Group& group = groups[blocks[i][0]];
        const Document& d = layout.documents[group.doc];
        const int64_t j = blocks[i][1];
        for (int64_t row = 0; row < std::min<int64_t>(kKeys, d.keys - j * kKeys); ++row) {
          const int64_t to = ((d.k0 + j * kKeys + row) * s.K + group.key_head) * H;
          for (const bool is_value : {false, true}) {
            parts.clear();
            for (int64_t u = group.first_unit; u < group.first_unit + group.units; ++u) {
              const Unit& unit = units[u];
              if (j < unit.from || j >= unit.to) continue;
              const int64_t half = is_value ? (unit.to - unit.from) * block_size : 0;
              parts.push_back(sums.get() + unit.place + half + (j - unit.from) * block_size + row * H);
            }
            add_parts(H, parts, is_value ? A(1) : scale, (is_value ? dv : dk) + to);
          }
        }
      });
}

#define TITANIUM_INSTANTIATE(T)                                                                          \
  template void attention_forward<T>(const AttentionShape&, const T*, const T*, const T*, T*, Wide<T>*); \
  template void attention_backward<T>(const AttentionShape&, const T*, const T*, const T*, const T*,     \
                                      const Wide<T>*, const T*, T*, T*, T*);
TITANIUM_INSTANTIATE(at::BFloat16)
TITANIUM_INSTANTIATE(float)
TITANIUM_INSTANTIATE(double)
#undef TITANIUM_INSTANTIATE

}  // namespace titanium
