#include "titanium/batch/partition.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// One group in the making: a chain of items.  Ties are broken by size, then by the first item, so that the
// order is total.
struct Bin {
  double sum = 0;
  int64_t count = 0, head = 0, tail = 0;
};
bool fuller(const Bin& a, const Bin& b) {
  if (a.sum != b.sum) return a.sum > b.sum;
  if (a.count != b.count) return a.count > b.count;
  return a.head > b.head;
}

// A partial solution: k bins, the fullest first, of which only those with items are kept.
struct Partial {
  std::vector<Bin> bins;
  double spread(int64_t k) const {
    return bins[0].sum - (static_cast<int64_t>(bins.size()) == k ? bins.back().sum : 0);
  }
};

// The fullest bin of one solution meets the emptiest of the other.  next[i] is the item after i in its bin.
// Only the bins that met are sorted again: mostly one of b meets many of a.
Partial merge(Partial a, const Partial& b, int64_t k, std::vector<int64_t>& next) {
  const int64_t in_a = static_cast<int64_t>(a.bins.size());
  const int64_t in_b = static_cast<int64_t>(b.bins.size());
  const int64_t untouched = std::min(in_a, k - in_b);
  for (int64_t j = 0; j < in_b; ++j) {
    const Bin& from = b.bins[static_cast<size_t>(j)];
    const int64_t i = k - 1 - j;
    if (i < in_a) {
      Bin& to = a.bins[static_cast<size_t>(i)];
      to.sum += from.sum;
      to.count += from.count;
      next[static_cast<size_t>(to.tail)] = from.head;
      to.tail = from.tail;
    } else {
      a.bins.push_back(from);
    }
  }
  const auto changed = a.bins.begin() + untouched;
  std::sort(changed, a.bins.end(), fuller);
  const auto first_moved = std::upper_bound(a.bins.begin(), changed, *changed, fuller);
  std::inplace_merge(first_moved, changed, a.bins.end(), fuller);
  return a;
}

std::vector<double> costs(std::span<const int64_t> lengths) {
  std::vector<double> out;
  out.reserve(lengths.size());
  for (int64_t n : lengths) out.push_back(cost(n));
  return out;
}

int64_t tokens_of(const std::vector<int64_t>& group, std::span<const int64_t> lengths) {
  int64_t tokens = 0;
  for (int64_t i : group) tokens += lengths[static_cast<size_t>(i)];
  return tokens;
}

double cost_of(const std::vector<int64_t>& group, std::span<const int64_t> lengths) {
  double sum = 0;
  for (int64_t i : group) sum += cost(lengths[static_cast<size_t>(i)]);
  return sum;
}

bool fits(const Groups& groups, std::span<const int64_t> lengths, int64_t budget) {
  return std::all_of(groups.begin(), groups.end(),
                     [&](const std::vector<int64_t>& group) { return tokens_of(group, lengths) <= budget; });
}

// Best-fit decreasing: each sequence, longest first, goes where it leaves the least room.
Groups best_fit(std::span<const int64_t> lengths, int64_t budget) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return lengths[static_cast<size_t>(a)] > lengths[static_cast<size_t>(b)];
  });
  Groups groups;
  std::set<std::pair<int64_t, size_t>> room;  // (free tokens, group)
  for (int64_t i : order) {
    const int64_t n = lengths[static_cast<size_t>(i)];
    auto place = room.lower_bound({n, 0});
    if (place == room.end()) {
      place = room.emplace(budget, groups.size()).first;
      groups.emplace_back();
    }
    const auto [free, group] = *place;
    room.erase(place);
    room.emplace(free - n, group);
    groups[group].push_back(i);
  }
  return groups;
}

// Halves the costliest group that has two sequences until there are k; what then lacks stays empty.
void split_up_to(Groups& groups, std::span<const int64_t> lengths, int64_t k) {
  while (static_cast<int64_t>(groups.size()) < k) {
    auto largest = groups.end();
    double most = -1;
    for (auto g = groups.begin(); g != groups.end(); ++g) {
      const double c = g->size() < 2 ? -1 : cost_of(*g, lengths);
      if (c > most) {
        most = c;
        largest = g;
      }
    }
    if (largest == groups.end()) {
      groups.resize(static_cast<size_t>(k));
      return;
    }
    std::vector<double> items;
    for (int64_t i : *largest) items.push_back(cost(lengths[static_cast<size_t>(i)]));
    const Groups halves = karmarkar_karp(items, 2);
    std::vector<int64_t> first, second;
    for (int64_t i : halves[0]) first.push_back((*largest)[static_cast<size_t>(i)]);
    for (int64_t i : halves[1]) second.push_back((*largest)[static_cast<size_t>(i)]);
    *largest = std::move(first);
    groups.push_back(std::move(second));
  }
}

void check(std::span<const std::vector<int64_t>> lengths_of_ranks, const SplitOptions& options) {
  if (options.budget < 1) throw BadConfig("{} must be > 0, got {}", options.budget_key, options.budget);
  if (options.divisor < 1) {
    throw BadConfig("the number of micro-batches cannot be a multiple of {}; > 0 is allowed",
                    options.divisor);
  }
  for (const auto& lengths : lengths_of_ranks) {
    for (size_t i = 0; i < lengths.size(); ++i) {
      if (lengths[i] < 1) throw BadData("sequence {} of the batch is empty", i);
      if (lengths[i] > options.budget) {
        throw BadData("sequence {} of the batch has {} tokens, more than {} = {}", i, lengths[i],
                      options.budget_key, options.budget);
      }
    }
  }
}

int64_t round_up(int64_t n, int64_t multiple) {
  return n % multiple == 0 ? n : n > INT64_MAX - multiple ? INT64_MAX : n + multiple - n % multiple;
}

}  // namespace

double cost(int64_t tokens) {
  const double n = static_cast<double>(tokens);
  return 24576 * n + n * n;
}

Groups karmarkar_karp(std::span<const double> items, int64_t k, bool equal_counts) {
  if (k < 1) throw BadConfig("cannot make {} groups; at least 1 is allowed", k);
  const int64_t n = static_cast<int64_t>(items.size());
  std::vector<int64_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return items[static_cast<size_t>(a)] < items[static_cast<size_t>(b)];
  });

  // Equal counts come from starting with solutions that hold one item in each of the k bins; only the one of
  // the smallest items may be short.
  std::vector<Partial> heap;
  const int64_t first = equal_counts ? (n % k == 0 ? k : n % k) : 1;
  const int64_t rest = equal_counts ? k : 1;
  for (int64_t begin = 0; begin < n;) {
    const int64_t end = begin + (begin == 0 ? first : rest);
    Partial partial;
    for (int64_t p = end - 1; p >= begin; --p) {
      const int64_t i = order[static_cast<size_t>(p)];
      partial.bins.push_back({items[static_cast<size_t>(i)], 1, i, i});
    }
    std::sort(partial.bins.begin(), partial.bins.end(), fuller);
    heap.push_back(std::move(partial));
    begin = end;
  }

  // The two solutions of the largest spread are merged until one is left.
  const auto less = [k](const Partial& a, const Partial& b) {
    const double spread_a = a.spread(k), spread_b = b.spread(k);
    if (spread_a != spread_b) return spread_a < spread_b;
    return fuller(b.bins[0], a.bins[0]);
  };
  const auto take = [&] {
    std::pop_heap(heap.begin(), heap.end(), less);
    Partial top = std::move(heap.back());
    heap.pop_back();
    return top;
  };
  std::make_heap(heap.begin(), heap.end(), less);
  std::vector<int64_t> next(items.size());
  while (heap.size() > 1) {
    Partial a = take();
    const Partial b = take();
    heap.push_back(merge(std::move(a), b, k, next));
    std::push_heap(heap.begin(), heap.end(), less);
  }

  Groups groups;
  groups.reserve(static_cast<size_t>(k));
  if (!heap.empty()) {
    for (const Bin& bin : heap[0].bins) {
      auto& group = groups.emplace_back();
      int64_t i = bin.head;
      for (int64_t c = 0; c < bin.count; ++c, i = next[static_cast<size_t>(i)]) group.push_back(i);
    }
  }
  groups.resize(static_cast<size_t>(k));
  for (auto& group : groups) std::sort(group.begin(), group.end());
  return groups;
}

Groups balance_ranks(std::span<const int64_t> lengths, int64_t ranks) {
  if (static_cast<int64_t>(lengths.size()) < ranks) {
    throw BadData("{} sequences cannot be spread over {} data ranks: each needs at least one", lengths.size(),
                  ranks);
  }
  return karmarkar_karp(costs(lengths), ranks, true);
}

std::vector<Groups> micro_batches(std::span<const std::vector<int64_t>> lengths_of_ranks,
                                  const SplitOptions& options) {
  check(lengths_of_ranks, options);
  const size_t ranks = lengths_of_ranks.size();
  std::vector<Groups> out(ranks);
  int64_t k = 0;
  for (size_t r = 0; r < ranks; ++r) {
    const auto& lengths = lengths_of_ranks[r];
    if (options.packing == Packing::kBestFit) {
      out[r] = best_fit(lengths, options.budget);
      k = std::max(k, static_cast<int64_t>(out[r].size()));
    } else {
      const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
      k = std::max(k, tokens / options.budget + (tokens % options.budget != 0));
    }
  }
  if (k > 0) k = std::max(k, options.at_least);
  for (k = round_up(k, options.divisor);; k += options.divisor) {
    bool all_fit = true;
    for (size_t r = 0; r < ranks; ++r) {
      const auto& lengths = lengths_of_ranks[r];
      if (k > static_cast<int64_t>(lengths.size()) && !options.allow_empty) {
        throw BadData(
            "{} = {} needs {} micro-batches (a multiple of {}), but data rank {} has {} sequences only",
            options.budget_key, options.budget, k, options.divisor, r, lengths.size());
      }
      if (options.packing == Packing::kBestFit) {
        split_up_to(out[r], lengths, k);
      } else if (k > 0) {
        out[r] = karmarkar_karp(costs(lengths), k);
        all_fit = all_fit && fits(out[r], lengths, options.budget);
      }
    }
    if (all_fit) break;
  }
  for (Groups& groups : out) {
    for (auto& group : groups) std::sort(group.begin(), group.end());
  }
  return out;
}

Groups deal(std::span<const double> costs, int64_t ranks) {
  const auto count = static_cast<int64_t>(costs.size());
  if (ranks < 1 || count % ranks != 0) throw Bug("{} items are dealt out to {} ranks", count, ranks);
  std::vector<int64_t> order(costs.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  if (ranks > 1) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      return costs[static_cast<size_t>(a)] > costs[static_cast<size_t>(b)];
    });
  }
  Groups out(static_cast<size_t>(ranks));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = i % ranks, turn = i / ranks;
    const int64_t rank = turn % 2 == 0 ? place : ranks - 1 - place;  // no rank always gets the costliest
    out[static_cast<size_t>(rank)].push_back(order[static_cast<size_t>(i)]);
  }
  return out;
}

Groups micro_batches(std::span<const int64_t> lengths, const SplitOptions& options) {
  const std::vector<int64_t> one(lengths.begin(), lengths.end());
  return std::move(micro_batches(std::span(&one, 1), options)[0]);
}

}  // namespace titanium
