#include "titanium/dist/conformance.h"

#include <ATen/ATen.h>

#include <cstring>
#include <memory>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/dist/agree.h"

namespace titanium {
namespace {

using std::chrono::milliseconds;

constexpr at::ScalarType kNumbers[] = {at::kFloat, at::kDouble, at::kBFloat16,
                                       at::kHalf,  at::kLong,   at::kInt};

// n numbers that belong to a rank: of many magnitudes, so that the order of a sum shows.
at::Tensor numbers(int rank, int64_t n, at::ScalarType dtype, uint64_t salt = 0) {
  at::Tensor out = at::empty({n}, at::kDouble);
  double* values = out.data_ptr<double>();
  uint64_t state = 0x9e3779b97f4a7c15 * (rank + 1) + salt;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const auto mantissa = static_cast<double>(state >> 40) / (1 << 24) - 0.5;
    values[i] = std::ldexp(mantissa, static_cast<int>(state >> 33 & 7));
  }
  if (at::isIntegralType(dtype, false)) out.mul_(100);
  if (dtype == at::kByte) out.abs_().clamp_max_(255);
  return out.to(dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.nbytes() == b.nbytes() &&
         std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

at::ScalarType wide(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

// The right sum of all ranks' numbers.
at::Tensor summed(int size, int64_t n, at::ScalarType dtype) {
  at::Tensor sum = numbers(0, n, dtype).to(wide(dtype));
  for (int rank = 1; rank < size; ++rank) sum.add_(numbers(rank, n, dtype).to(wide(dtype)));
  return sum.to(dtype);
}

void expect_sum(const Backend& backend, const at::Tensor& got, const at::Tensor& want,
                const std::string& what) {
  if (backend.rank_order) {
    EXPECT_TRUE(same_bits(got, want)) << what;
  } else {
    const double tolerance = got.scalar_type() == at::kDouble  ? 1e-13
                             : got.scalar_type() == at::kFloat ? 1e-5
                                                               : 2e-2;
    EXPECT_TRUE(at::allclose(got.to(at::kDouble), want.to(at::kDouble), tolerance, 64 * tolerance)) << what;
  }
}

std::string label(const char* call, int size, int64_t n, at::ScalarType dtype) {
  return fmt::format("{} over {} of {} {}", call, size, n, at::toString(dtype));
}

// Odd sizes around those of one round, and some MB.
std::vector<int64_t> sizes(at::ScalarType dtype) {
  if (dtype == at::kFloat) return {1, 3, 64, 1021, 65536, 65537, 262147, 1048573};
  return {1, 7, 4099, 131101};
}

std::vector<int> world_sizes(const Backend& backend) {
  return backend.most_ranks >= 8 ? std::vector<int>{2, 3, 5, 8} : std::vector<int>{2, backend.most_ranks};
}

TEST_P(Conformance, AllGatherGivesEveryRanksPart) {
  for (const int size : world_sizes(GetParam())) {
    run(size, [](std::shared_ptr<World> world) {
      const Group all = world->all();
      ASSERT_EQ(all.rank(), world->rank());
      ASSERT_EQ(all.size(), world->size());
      for (const at::ScalarType dtype :
           {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong, at::kInt, at::kByte}) {
        for (const int64_t n : sizes(dtype)) {
          std::vector<at::Tensor> parts;
          for (int rank = 0; rank < all.size(); ++rank) parts.push_back(numbers(rank, n, dtype));
          const at::Tensor want = at::cat(parts);
          at::Tensor flat = at::zeros_like(want);
          flat.narrow(0, all.rank() * n, n).copy_(parts[all.rank()]);
          all.all_gather(flat);
          EXPECT_TRUE(same_bits(flat, want)) << label("all_gather", all.size(), n, dtype);
        }
      }
    });
  }
}

TEST_P(Conformance, ReduceScatterLeavesTheSumInTheOwnPart) {
  for (const int size : world_sizes(GetParam())) {
    run(size, [this](std::shared_ptr<World> world) {
      const Group all = world->all();
      for (const at::ScalarType dtype : kNumbers) {
        for (const int64_t n : sizes(dtype)) {
          if (n * all.size() > 800000) continue;
          const at::Tensor flat = numbers(all.rank(), n * all.size(), dtype);
          all.reduce_scatter(flat);
          expect_sum(GetParam(), flat.narrow(0, all.rank() * n, n).clone(),
                     summed(all.size(), n * all.size(), dtype).narrow(0, all.rank() * n, n).clone(),
                     label("reduce_scatter", all.size(), n, dtype));
        }
      }
    });
  }
}

TEST_P(Conformance, AllReduceIsTheSumOnEveryRank) {
  for (const int size : world_sizes(GetParam())) {
    run(size, [this](std::shared_ptr<World> world) {
      const Group all = world->all();
      for (const at::ScalarType dtype : kNumbers) {
        for (const int64_t n : sizes(dtype)) {
          const at::Tensor flat = numbers(all.rank(), n, dtype);
          all.all_reduce(flat);
          expect_sum(GetParam(), flat, summed(all.size(), n, dtype),
                     label("all_reduce", all.size(), n, dtype));
          // And the same bits everywhere.
          const std::string bits(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
          if (n < 10000) {
            for (const std::string& other : all.exchange(bits)) EXPECT_EQ(other, bits);
          }
        }
      }
    });
  }
}

TEST_P(Conformance, MaximaAndMinima) {
  run(3, [](std::shared_ptr<World> world) {
    const Group all = world->all();
    for (const at::ScalarType dtype : kNumbers) {
      for (const int64_t n : {1, 33, 70001}) {
        at::Tensor rows = at::stack({numbers(0, n, dtype), numbers(1, n, dtype), numbers(2, n, dtype)});
        const at::Tensor most = rows[all.rank()].clone(), least = rows[all.rank()].clone();
        all.all_reduce(most, ReduceOp::kMax);
        all.all_reduce(least, ReduceOp::kMin);
        EXPECT_TRUE(same_bits(most, std::get<0>(rows.max(0)))) << label("max", 3, n, dtype);
        EXPECT_TRUE(same_bits(least, std::get<0>(rows.min(0)))) << label("min", 3, n, dtype);
      }
    }
  });
}

TEST_P(Conformance, BroadcastFromEachRank) {
  run(3, [](std::shared_ptr<World> world) {
    const Group all = world->all();
    for (int root = 0; root < all.size(); ++root) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kLong, at::kByte}) {
        for (const int64_t n : {1, 5, 300007}) {
          const at::Tensor flat = numbers(all.rank(), n, dtype);
          all.broadcast(flat, root);
          EXPECT_TRUE(same_bits(flat, numbers(root, n, dtype))) << label("broadcast", 3, n, dtype);
        }
      }
    }
  });
}

TEST_P(Conformance, NothingIsNotACollective) {
  run(2, [](std::shared_ptr<World> world) {
    const Group all = world->all();
    const at::Tensor nothing = at::empty({0});
    all.all_gather(nothing);
    all.all_reduce(nothing);
    all.start_reduce_scatter(nothing).wait();
    EXPECT_EQ(all.sum(1), 2);
  });
}

TEST_P(Conformance, ExchangeOfBytesOfAnyLength) {
  for (const int size : {2, 4}) {
    run(size, [](std::shared_ptr<World> world) {
      const Group all = world->all();
      const auto text = [](int rank, size_t length) {
        std::string bytes(length, '\0');
        for (size_t i = 0; i < length; ++i) bytes[i] = static_cast<char>(i * 131 + rank);
        return bytes;
      };
      const auto check = [&](const std::vector<size_t>& lengths) {
        const std::vector<std::string> got = all.exchange(text(all.rank(), lengths[all.rank()]));
        ASSERT_EQ(got.size(), static_cast<size_t>(all.size()));
        for (int rank = 0; rank < all.size(); ++rank) {
          EXPECT_TRUE(got[rank] == text(rank, lengths[rank])) << "length " << lengths[rank];
        }
      };
      check({0, 0, 0, 0});
      check({1, 0, 2, 0});
      check({0, 3'000'001, 17, 262'144});
      check({262'136, 262'137, 262'144, 524'288});  // around the ends of rounds
      check({5, 5, 5, 5});
    });
  }
}

TEST_P(Conformance, NobodyLeavesABarrierBeforeAllCame) {
  run(4, [](std::shared_ptr<World> world) {
    const Group all = world->all();
    for (int late = 0; late < all.size(); ++late) {
      if (world->rank() == late) std::this_thread::sleep_for(milliseconds(20));
      const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
      const int64_t came = now();
      all.barrier();
      const int64_t left = now();
      for (const std::string& other : all.exchange(std::to_string(came))) EXPECT_GE(left, std::stoll(other));
    }
  });
}

TEST_P(Conformance, SumsOfNumbers) {
  run(3, [](std::shared_ptr<World> world) {
    EXPECT_EQ(world->all().sum(0.1 * (world->rank() + 1)), 0.1 * 1 + 0.1 * 2 + 0.1 * 3);
  });
}

TEST_P(Conformance, SubgroupsKeepTheirOwnRanks) {
  run(5, [this](std::shared_ptr<World> world) {
    const std::vector<int> ranks = {0, 2, 3};
    if (world->rank() == 1 || world->rank() == 4) return;
    const Group group = world->group(ranks);
    ASSERT_EQ(group.size(), 3);
    ASSERT_EQ(ranks[group.rank()], world->rank());
    const at::Tensor flat = numbers(group.rank(), 99, at::kFloat);
    group.all_reduce(flat);
    expect_sum(GetParam(), flat, summed(3, 99, at::kFloat), "a subgroup");
    EXPECT_EQ(world->group({world->rank()}).size(), 1);
  });
}

TEST_P(Conformance, AGroupTheRankIsNotInIsABug) {
  run(2, [](std::shared_ptr<World> world) {
    EXPECT_THROW(world->group({1 - world->rank()}), Bug);
    EXPECT_THROW(world->group({0, 1, 2}), Bug);
    EXPECT_THROW(world->group({1, 0}), Bug);
    EXPECT_THROW(world->group({}), Bug);
  });
}

// A mesh of 2 x rest: rows and columns are under way at once, started in one order and waited for in another.
TEST_P(Conformance, GroupsThatCross) {
  const int size = std::min(GetParam().most_ranks, 8);
  run(size, [this](std::shared_ptr<World> world) {
    const int columns = world->size() / 2, row = world->rank() / columns, column = world->rank() % columns;
    if (row > 1) return;
    std::vector<int> along;
    for (int i = 0; i < columns; ++i) along.push_back(row * columns + i);
    const Group in_row = world->group(along), in_column = world->group({column, columns + column});
    for (int round = 0; round < 10; ++round) {
      const int64_t n = 1000 + 7777 * round;
      at::Tensor a = numbers(in_row.rank(), n * in_row.size(), at::kFloat);
      at::Tensor b = numbers(in_column.rank(), n * 2, at::kFloat);
      Pending first, second;
      if ((world->rank() + round) % 2 == 0) {
        first = in_row.start_reduce_scatter(a);
        second = in_column.start_reduce_scatter(b);
      } else {
        second = in_column.start_reduce_scatter(b);
        first = in_row.start_reduce_scatter(a);
      }
      second.wait();
      first.wait();
      if (in_row.size() > 1) {
        expect_sum(
            GetParam(), a.narrow(0, in_row.rank() * n, n).clone(),
            summed(in_row.size(), n * in_row.size(), at::kFloat).narrow(0, in_row.rank() * n, n).clone(),
            "row");
      }
      expect_sum(GetParam(), b.narrow(0, in_column.rank() * n, n).clone(),
                 summed(2, n * 2, at::kFloat).narrow(0, in_column.rank() * n, n).clone(), "column");
    }
  });
}

TEST_P(Conformance, StartedAndBlockingCallsOfOneGroup) {
  run(3, [this](std::shared_ptr<World> world) {
    const Group all = world->all();
    const int64_t n = 50001;
    std::vector<at::Tensor> gathered;
    std::vector<Pending> pending;
    for (int i = 0; i < 8; ++i) {
      at::Tensor flat = at::zeros({3 * n});
      flat.narrow(0, all.rank() * n, n).copy_(numbers(all.rank(), n, at::kFloat, i));
      gathered.push_back(flat);
      pending.push_back(all.start_all_gather(flat));
      if (i % 3 == 1) {
        const at::Tensor sum = numbers(all.rank(), 77, at::kDouble);
        all.all_reduce(sum);
        expect_sum(GetParam(), sum, summed(3, 77, at::kDouble), "between started ones");
      }
      if (i == 5) {
        EXPECT_EQ(all.exchange(std::to_string(all.rank())), (std::vector<std::string>{"0", "1", "2"}));
      }
    }
    pending[3] = {};  // not waited for: its end is
    for (Pending& one : pending) one.wait();
    for (int i = 0; i < 8; ++i) {
      for (int rank = 0; rank < 3; ++rank) {
        EXPECT_TRUE(same_bits(gathered[i].narrow(0, rank * n, n), numbers(rank, n, at::kFloat, i)));
      }
    }
    all.barrier();
  });
}

TEST_P(Conformance, TwoThreadsWithGroupsOfTheirOwn) {
  run(2, [this](std::shared_ptr<World> world) {
    const auto work = [&](const std::string& purpose) {
      const Group group = world->all(purpose);
      for (int i = 0; i < 50; ++i) {
        const at::Tensor flat = numbers(group.rank(), 4001, at::kFloat);
        group.all_reduce(flat);
        expect_sum(GetParam(), flat, summed(2, 4001, at::kFloat), purpose);
      }
    };
    std::thread other(work, "save");
    work("");
    other.join();
  });
}

TEST_P(Conformance, ManySmallCalls) {
  run(std::min(GetParam().most_ranks, 4), [](std::shared_ptr<World> world) {
    const Group all = world->all();
    const int64_t size = all.size();
    for (int64_t i = 0; i < 300; ++i) {
      const at::Tensor flat = at::full({1}, i + all.rank(), at::kLong);
      all.all_reduce(flat);
      ASSERT_EQ(flat.item<int64_t>(), size * i + size * (size - 1) / 2);
      const at::Tensor sent = at::full({2}, all.rank() * 1000 + i, at::kLong);
      all.broadcast(sent, static_cast<int>(i % size));
      ASSERT_EQ(sent[1].item<int64_t>(), i % size * 1000 + i);
    }
  });
}

TEST_P(Conformance, TwoRunsAreBitwiseEqual) {
  std::string bits[2];
  for (std::string& one : bits) {
    run(3, [&one](std::shared_ptr<World> world) {
      const Group all = world->all();
      at::Tensor flat = numbers(all.rank(), 200003, at::kFloat);
      all.all_reduce(flat);
      at::Tensor half = numbers(all.rank(), 3 * 4001, at::kBFloat16);
      all.reduce_scatter(half);
      const std::string mine(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
      const std::string part(static_cast<const char*>(half.data_ptr()) + all.rank() * 8002, 8002);
      all.exchange(part);
      if (all.rank() == 0) one = mine + part;  // seen by the test where ranks are threads
    });
  }
  EXPECT_TRUE(bits[0] == bits[1]);
}

TEST_P(Conformance, AgreeGivesAllRanksTheErrorOfOne) {
  run(3, [](std::shared_ptr<World> world) {
    const Group all = world->all();
    agree(all, [] {});
    try {
      agree(all, [&] {
        if (world->rank() >= 1) throw BadData("file-{}.jsonl: no such file", world->rank());
      });
      ADD_FAILURE() << "no error";
    } catch (const BadData& e) {
      EXPECT_STREQ(e.what(), "rank 1: file-1.jsonl: no such file");
    }
    agree_on(all, "the config", "a = 1\nb = 2");
    try {
      agree_on(all, "the config", world->rank() == 2 ? "a = 1\nb = 3" : "a = 1\nb = 2");
      ADD_FAILURE() << "no error";
    } catch (const BadConfig& e) {
      EXPECT_STREQ(e.what(), "the config of rank 2 is not that of rank 0: 'b = 3' against 'b = 2'");
    }
    const std::string line(1000, 'x');  // what differs is shown, wherever it is
    try {
      agree_on(all, "the file", line + (world->rank() == 1 ? "one" : "two") + line);
      ADD_FAILURE() << "no error";
    } catch (const BadConfig& e) {
      const std::string before = "..." + std::string(60, 'x'), after(137, 'x');
      EXPECT_EQ(e.what(),
                fmt::format("the file of rank 1 is not that of rank 0: '{0}one{1}' against '{0}two{1}'",
                            before, after));
    }
    EXPECT_EQ(all.sum(1), 3);  // the run goes on
  });
}

std::string contains_all(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == text.npos) return fmt::format("'{}' is not in '{}'", part, text);
  }
  return "";
}

TEST_P(Conformance, WhatOneRankThrowsEndsAll) {
  const auto start = std::chrono::steady_clock::now();
  try {
    run(4, [this](std::shared_ptr<World> world) {
      world->progress(7, "forward");
      world->all().barrier();
      if (world->rank() == 2) throw BadData("the file is gone");
      try {
        // In groups with and without that rank, waited for and not.
        if (world->rank() == 3) {
          const Pending pending = world->all().start_all_gather(at::zeros({4000}));
          world->group({0, 3}).barrier();
        } else {
          world->all().all_gather(at::zeros({4000}));
        }
        ADD_FAILURE() << "a collective came back without a rank that threw";
      } catch (const RankLost& e) {
        if (GetParam().names_lost_rank) {
          EXPECT_EQ(contains_all(e.what(), {"rank 2", "the file is gone", "step 7", "forward"}), "");
        }
        throw;
      }
    });
    FAIL() << "no error";
  } catch (const BadData& e) {
    EXPECT_STREQ(e.what(), "the file is gone");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_P(Conformance, ARankThatThrowsWithACollectiveUnderWay) {
  const auto start = std::chrono::steady_clock::now();
  const auto work = [](const std::shared_ptr<World>& world) {
    const Group all = world->all();
    all.barrier();
    if (world->rank() == 1) return world->all("another").barrier();  // never comes to the gather
    const Pending pending = all.start_all_gather(at::zeros({4000}));
    throw BadConfig("while a collective is under way");
  };
  EXPECT_THROW(run(2, work), BadConfig);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST_P(Conformance, ARankThatLeavesIsNamed) {
  try {
    run(3, [](std::shared_ptr<World> world) {
      world->all().barrier();
      world->progress(3, "backward");
      if (world->rank() == 1) return;
      world->all().all_reduce(at::ones({10}));
      ADD_FAILURE() << "a sum without a rank that left";
    });
    FAIL() << "no error";
  } catch (const RankLost& e) {
    if (GetParam().names_lost_rank) {
      EXPECT_EQ(contains_all(e.what(), {"rank 1", "step 3", "backward"}), "");
    }
  }
}

TEST_P(Conformance, ARankThatDoesNotComeIsNamedAfterTheTimeout) {
  const auto start = std::chrono::steady_clock::now();
  try {
    run(
        3,
        [](std::shared_ptr<World> world) {
          world->all().barrier();
          world->progress(12, "recompute");
          if (world->rank() == 1) std::this_thread::sleep_for(milliseconds(5000));
          // Rank 2 waits for rank 0, which waits for rank 1: that is the one to name.
          if (world->rank() != 2) world->group({0, 1}).barrier();
          if (world->rank() != 1) world->group({0, 2}).barrier();
          ADD_FAILURE() << "came back";
        },
        milliseconds(2000));
    FAIL() << "no error";
  } catch (const RankLost& e) {
    if (GetParam().names_lost_rank) {
      EXPECT_EQ(
          contains_all(e.what(), {"rank 1", " 2 s (comm.train_timeout_seconds)", "step 12", "recompute"}),
          "");
    }
  }
  EXPECT_GE(std::chrono::steady_clock::now() - start, milliseconds(2000));
}

}  // namespace
}  // namespace titanium
