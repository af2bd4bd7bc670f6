// What every transport must do: tests that run on each.  A transport's own test instantiates them:
//   INSTANTIATE_TEST_SUITE_P(Local, Conformance, ::testing::Values(Backend{"threads", run_ranks}));
#pragma once
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "titanium/dist/world.h"

namespace titanium {

struct Backend {
  std::string name;
  // Runs the work on every rank of a world of `size`, each with this timeout for a collective; throws what
  // the first rank threw, as run_ranks does.
  std::function<void(int size, const std::function<void(std::shared_ptr<World>)>& work,
                     std::chrono::milliseconds timeout)>
      run;
  // True: sums are those of adding the ranks' rows in order.  False: only equal on all ranks and in every
  // run.
  bool rank_order = true;
  // True: the message of RankLost names the rank, its reason and its last progress.
  bool names_lost_rank = true;
  int most_ranks = 8;  // of the larger tests

  friend void PrintTo(const Backend& backend, std::ostream* out) { *out << backend.name; }
};

class Conformance : public ::testing::TestWithParam<Backend> {
 protected:
  void run(int size, const std::function<void(std::shared_ptr<World>)>& work,
           std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    GetParam().run(size, work, timeout);
  }
};

}  // namespace titanium
