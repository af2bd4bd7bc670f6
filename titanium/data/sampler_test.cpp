#include "titanium/data/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "titanium/base/error.h"
#include "titanium/base/random.h"

namespace titanium {
namespace {

std::vector<int64_t> numbers(int64_t n) {
  std::vector<int64_t> out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

// Every sample of all steps from a position on, and the lengths of the steps.
struct Run {
  std::vector<int64_t> records, sizes;
};
Run run(const Sampler& sampler, int64_t position = 0) {
  Run out;
  while (auto step = sampler.at(position)) {
    EXPECT_EQ(step->begin, position);
    EXPECT_EQ(step->end - step->begin, static_cast<int64_t>(step->records.size()));
    out.records.insert(out.records.end(), step->records.begin(), step->records.end());
    out.sizes.push_back(step->end - step->begin);
    position = step->end;
  }
  return out;
}

// 1000 samples, batch 128, 3 epochs, batches run on over the ends of epochs: 23 planned, 23 done.
TEST(Sampler, PlannedStepsAreTheStepsDone) {
  SamplerOptions options{.seed = 1, .global_batch_size = 128, .epochs = 3};
  const Sampler drop(numbers(1000), options);
  EXPECT_EQ(drop.steps_for(3), 23);
  EXPECT_EQ(drop.left_out(3), 56);
  EXPECT_EQ(run(drop).sizes, std::vector<int64_t>(23, 128));

  options.last_batch = LastBatch::kKeep;
  const Sampler keep(numbers(1000), options);
  EXPECT_EQ(keep.steps_for(3), 24);
  EXPECT_EQ(keep.left_out(3), 0);
  auto sizes = std::vector<int64_t>(23, 128);
  sizes.push_back(56);
  EXPECT_EQ(run(keep).sizes, sizes);

  options.last_batch = LastBatch::kFail;
  EXPECT_THROW(Sampler(numbers(1000), options), BadConfig);
  EXPECT_EQ(Sampler(numbers(1024), options).steps_for(3), 24);

  // 10 batches of 128 as mini-batches of 64.
  const Sampler mini(numbers(1280), {.global_batch_size = 64, .epochs = 1});
  EXPECT_EQ(mini.steps_for(1), 20);
  EXPECT_EQ(run(mini).sizes.size(), 20u);
  // 10 samples, batch 4: 4, 4, 2.
  const Sampler ten(numbers(10), {.global_batch_size = 4, .epochs = 1, .last_batch = LastBatch::kKeep});
  EXPECT_EQ(run(ten).sizes, (std::vector<int64_t>{4, 4, 2}));
}

TEST(Sampler, EveryEpochHoldsEveryRecordOnceInAnotherOrder) {
  const auto records = std::vector<int64_t>{5, 7, 11, 13, 17, 19, 23};
  const Sampler sampler(records,
                        {.seed = 9, .global_batch_size = 3, .epochs = 30, .last_batch = LastBatch::kKeep});
  const auto all = run(sampler).records;
  ASSERT_EQ(all.size(), 7u * 30);
  std::vector<std::vector<int64_t>> epochs;
  for (size_t e = 0; e < 30; ++e) {
    std::vector<int64_t> epoch(all.begin() + static_cast<int64_t>(7 * e),
                               all.begin() + static_cast<int64_t>(7 * e) + 7);
    epochs.push_back(epoch);
    std::sort(epoch.begin(), epoch.end());
    EXPECT_EQ(epoch, records);
  }
  EXPECT_NE(epochs[0], records);
  EXPECT_NE(epochs[0], epochs[1]);
  std::sort(epochs.begin(), epochs.end());
  EXPECT_EQ(std::unique(epochs.begin(), epochs.end()), epochs.end());

  const Sampler plain(records, {.seed = 9, .shuffle = false, .global_batch_size = 7, .epochs = 2});
  EXPECT_EQ(plain.step(0)->records, records);
  EXPECT_EQ(plain.step(1)->records, records);
}

// The orders themselves are a promise: a checkpoint of today must resume tomorrow.
TEST(Sampler, OrdersDoNotChangeBetweenVersions) {
  const Sampler sampler(numbers(8), {.seed = 42, .global_batch_size = 8});
  EXPECT_EQ(sampler.step(0)->records, (std::vector<int64_t>{3, 6, 5, 2, 0, 7, 1, 4}));
  EXPECT_EQ(sampler.step(5)->records, (std::vector<int64_t>{4, 5, 0, 1, 3, 7, 2, 6}));
}

// A step depends on (seed, step) alone: not on what was asked before, nor on the number of epochs.
TEST(Sampler, StepsArePureFunctions) {
  for (bool by_tokens : {false, true}) {
    SamplerOptions options{.seed = 3};
    (by_tokens ? options.global_batch_tokens : options.global_batch_size) = by_tokens ? 40 : 9;
    const auto length = [](int64_t record) { return 1 + record % 13; };
    const Sampler endless(numbers(50), options, length);
    int64_t position = 0;
    std::vector<StepRecords> steps;
    for (int64_t s = 0; s < 60; ++s) {
      steps.push_back(*endless.at(position));
      position = steps.back().end;
    }
    options.epochs = 4;
    const Sampler bounded(numbers(50), options, length);
    const Random random(2, Purpose::kTest);
    for (uint64_t trial = 0; trial < 200; ++trial) {
      const auto s = static_cast<int64_t>(random.below(trial, 60));
      const auto step = Sampler(endless).step(s);
      ASSERT_EQ(step->records, steps[static_cast<size_t>(s)].records);
      ASSERT_EQ(step->begin, steps[static_cast<size_t>(s)].begin);
      const auto same = bounded.step(s);
      ASSERT_EQ(same.has_value(), s < bounded.steps_for(4));
      if (same) {
        ASSERT_EQ(same->records, step->records);
      }
    }
    options.seed = 4;
    EXPECT_NE(Sampler(numbers(50), options, length).step(0)->records, steps[0].records);
  }
}

// Stop anywhere, go on from the position: nothing is repeated, nothing left out, also with another batch
// size.
TEST(Sampler, APositionIsAllThatIsSaved) {
  SamplerOptions options{.seed = 6, .global_batch_size = 6, .epochs = 5, .last_batch = LastBatch::kKeep};
  const auto straight = run(Sampler(numbers(23), options)).records;
  for (int64_t stop = 0; stop <= 19; ++stop) {
    const Sampler first(numbers(23), options);
    std::vector<int64_t> got;
    int64_t position = 0;
    for (int64_t s = 0; s < stop; ++s) {
      const auto step = first.at(position);
      got.insert(got.end(), step->records.begin(), step->records.end());
      position = step->end;
    }
    SamplerOptions other = options;
    if (stop % 2) other.global_batch_size = 10;
    const auto rest = run(Sampler(numbers(23), other), position).records;
    got.insert(got.end(), rest.begin(), rest.end());
    ASSERT_EQ(got, straight) << stop;
  }
}

TEST(Sampler, BatchesOfATokenBudget) {
  const auto length = [](int64_t record) { return 1 + record * 7 % 30; };
  for (LastBatch last : {LastBatch::kDrop, LastBatch::kKeep}) {
    const Sampler sampler(numbers(40),
                          {.seed = 8, .global_batch_tokens = 64, .epochs = 3, .last_batch = last}, length);
    int64_t position = 0, steps = 0;
    while (auto step = sampler.at(position)) {
      const auto tokens = [&](int64_t end) {
        int64_t sum = 0;
        for (int64_t p = position; p < end; ++p) {
          sum += length(p < step->end ? step->records[static_cast<size_t>(p - position)]
                                      : sampler.at(step->end)->records[0]);
        }
        return sum;
      };
      ASSERT_LE(tokens(step->end), 64);
      if (sampler.at(step->end)) {
        ASSERT_GT(tokens(step->end + 1), 64);
      }
      ASSERT_EQ(sampler.step(steps)->records, step->records);
      position = step->end;
      ++steps;
    }
    EXPECT_EQ(steps, sampler.steps_for(3));
    EXPECT_EQ(position + sampler.left_out(3), 120);
    EXPECT_EQ(sampler.left_out(3) == 0, last == LastBatch::kKeep);
    EXPECT_FALSE(sampler.step(steps));
  }
}

// A budget that the last samples fill to the token leaves no rest.
TEST(Sampler, ABudgetFilledExactly) {
  const auto four = [](int64_t) { return int64_t{4}; };
  const Sampler sampler(numbers(6), {.global_batch_tokens = 8, .epochs = 1, .last_batch = LastBatch::kFail},
                        four);
  EXPECT_EQ(run(sampler).sizes, (std::vector<int64_t>{2, 2, 2}));
  EXPECT_THROW(Sampler(numbers(7), sampler.options(), four), BadConfig);
}

TEST(Sampler, ABatchMayHoldMoreThanAnEpoch) {
  const Sampler sampler(numbers(3), {.seed = 1, .global_batch_size = 10});
  auto records = sampler.step(0)->records;
  ASSERT_EQ(records.size(), 10u);
  std::sort(records.begin(), records.begin() + 3);
  EXPECT_EQ(std::vector<int64_t>(records.begin(), records.begin() + 3), numbers(3));
  EXPECT_EQ(sampler.step(1)->begin, 10);
  EXPECT_DOUBLE_EQ(sampler.epoch(9), 3);
}

TEST(Sampler, Refusals) {
  const SamplerOptions good{.global_batch_size = 4};
  EXPECT_THROW(Sampler({}, good), BadData);
  EXPECT_THROW(Sampler(numbers(5), {}), BadConfig);
  EXPECT_THROW(Sampler(numbers(5), {.global_batch_size = -1}), BadConfig);
  EXPECT_THROW(Sampler(numbers(5), {.global_batch_size = 4, .global_batch_tokens = 4}), BadConfig);
  EXPECT_THROW(Sampler(numbers(5), {.global_batch_size = 4, .epochs = -1}), BadConfig);
  EXPECT_THROW(Sampler(numbers(5), {.global_batch_size = 4, .epochs = int64_t{1} << 62}), BadConfig);
  EXPECT_THROW(Sampler(numbers(5), {.global_batch_size = 11, .epochs = 2}), BadConfig);
  EXPECT_EQ(Sampler(numbers(5), {.global_batch_size = 11, .epochs = 2, .last_batch = LastBatch::kKeep})
                .steps_for(2),
            1);
  EXPECT_THROW(Sampler(numbers(6), {.global_batch_tokens = 4}, [](int64_t r) { return r; }), BadData);
  EXPECT_THROW(Sampler(numbers(5), {.global_batch_tokens = 4}), Bug);
  const Sampler sampler(numbers(5), {.global_batch_size = 4, .epochs = 2});
  EXPECT_THROW(sampler.at(-1), BadData);
  EXPECT_THROW(sampler.at(11), BadData);
  EXPECT_FALSE(sampler.at(10));
  EXPECT_FALSE(sampler.step(2));
  EXPECT_FALSE(sampler.step(int64_t{1} << 62));
  EXPECT_EQ(last_batch_from("keep"), LastBatch::kKeep);
  EXPECT_THROW(last_batch_from("pad"), BadConfig);
}

}  // namespace
}  // namespace titanium
