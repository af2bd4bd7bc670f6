// Cuts a list of sequence lengths into groups: over data ranks, then into micro-batches of a token budget.
// Works on lengths alone; every function is deterministic, so all ranks that know the lengths agree without
// talking.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace titanium {

using Groups = std::vector<std::vector<int64_t>>;  // groups of indices, ascending in each group

// Work of a document of n tokens in arbitrary units: 24576 n + n^2 (linear layers and attention of a 7B
// model, the measure that verl balances on).
double cost(int64_t tokens);

// Largest differencing method (Karmarkar and Karp, 1982) for k groups: groups with nearly equal sums of
// `items`. With equal_counts the
// groups' sizes differ by at most one.  BadConfig for k < 1.
Groups karmarkar_karp(std::span<const double> items, int64_t k, bool equal_counts = false);

// Spreads sequences over data ranks: equal numbers (to one), nearly equal cost.  BadData for fewer sequences
// than ranks.
Groups balance_ranks(std::span<const int64_t> lengths, int64_t ranks);

enum class Packing {
  kBalanced,  // micro-batches of nearly equal cost
  kBestFit,   // as few micro-batches as best-fit-decreasing finds
};

struct SplitOptions {
  int64_t budget = 0;                             // tokens of a micro-batch, > 0, never exceeded
  std::string budget_key = "micro-batch tokens";  // the config key of budget, for messages
  Packing packing = Packing::kBalanced;
  int64_t divisor = 1;       // the number of micro-batches is a multiple of it
  int64_t at_least = 1;      // and no smaller than this
  bool allow_empty = false;  // a rank with too few sequences gets empty groups; else that is BadData
};

// Micro-batches of every rank, the same number on each: at least max over ranks of ceil(tokens / budget),
// capped by the rank's number of sequences, rounded up to divisor, then + divisor until all groups fit the
// budget.
//   in   lengths of each rank's sequences       out   [rank][micro-batch] -> indices into the rank's list
// BadData: a sequence longer than the budget (its length, the budget and its key), or too few sequences.
std::vector<Groups> micro_batches(std::span<const std::vector<int64_t>> lengths_of_ranks,
                                  const SplitOptions& options);
Groups micro_batches(std::span<const int64_t> lengths, const SplitOptions& options);  // one rank

// Deals items, such as micro-batches, out to ranks, as many to each: [rank] -> indices.  Those at one place
// of the lists, which the ranks run at the same time, are near in cost.  Bug: ranks that do not divide their
// number.
Groups deal(std::span<const double> costs, int64_t ranks);

}  // namespace titanium
