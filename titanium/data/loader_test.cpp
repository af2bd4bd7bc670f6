#include "titanium/data/loader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/data/test_files.h"

namespace titanium {
namespace {

Dataset numbered(int n) {
  const TestFolder folder("loader");
  DataOptions options;
  options.files = {folder.write("a.jsonl", numbered_records(n))};
  options.vocab_size = 100000;
  return Dataset::load(options, nullptr, nullptr);
}

bool operator==(const Sample& a, const Sample& b) {
  return a.ids == b.ids && a.loss_mask == b.loss_mask && a.index == b.index;
}

Step one(int64_t position, int64_t end) {
  return {.begin = position, .end = end, .records = {}, .samples = {}};
}

std::vector<Step> all(Loader& loader) {
  std::vector<Step> out;
  while (auto step = loader.next()) out.push_back(std::move(*step));
  return out;
}

TEST(Loader, GivesTheSamplesOfEachStep) {
  const Dataset data = numbered(30);
  const Sampler sampler(data.train(), {.seed = 1, .global_batch_size = 8, .epochs = 2});
  Loader loader(data, sampler);
  const auto steps = all(loader);
  ASSERT_EQ(static_cast<int64_t>(steps.size()), sampler.steps_for(2));
  for (size_t s = 0; s < steps.size(); ++s) {
    EXPECT_EQ(steps[s].records, sampler.step(static_cast<int64_t>(s))->records);
    for (size_t i = 0; i < steps[s].samples.size(); ++i) {
      EXPECT_EQ(steps[s].samples[i].index, static_cast<int64_t>(i));
      EXPECT_EQ(steps[s].samples[i].ids[0], steps[s].records[i]);
    }
  }
  EXPECT_FALSE(loader.next());  // and stays at its end
  EXPECT_EQ(loader.position(), 56);
}

// Saved after any step, with steps made in advance at hand: what follows is what the straight run sees.
TEST(Loader, AResumedRunEqualsTheStraightRun) {
  const Dataset data = numbered(41);
  for (bool by_tokens : {false, true}) {
    SamplerOptions options{.seed = 5, .epochs = 3, .last_batch = LastBatch::kKeep};
    (by_tokens ? options.global_batch_tokens : options.global_batch_size) = by_tokens ? 33 : 7;
    const Sampler sampler(data.train(), options, [&](int64_t record) { return data.length(record); });
    Loader straight_loader(data, sampler);
    const auto straight = all(straight_loader);
    for (size_t stop = 0; stop <= straight.size(); ++stop) {
      int64_t position = 0;
      {
        Loader loader(data, sampler, 0, 3);
        for (size_t s = 0; s < stop; ++s) ASSERT_TRUE(loader.next());
        position = loader.position();
      }
      ASSERT_EQ(position, stop == 0 ? 0 : straight[stop - 1].end);
      Loader resumed(data, sampler, position);
      const auto rest = all(resumed);
      ASSERT_EQ(rest.size(), straight.size() - stop);
      for (size_t s = 0; s < rest.size(); ++s) {
        ASSERT_EQ(rest[s].records, straight[stop + s].records);
        ASSERT_EQ(rest[s].samples.size(), straight[stop + s].samples.size());
        for (size_t i = 0; i < rest[s].samples.size(); ++i) {
          ASSERT_TRUE(rest[s].samples[i] == straight[stop + s].samples[i]);
        }
      }
    }
  }
}

TEST(Loader, AnErrorArrivesAtItsStepAndStays) {
  Loader loader(
      [](int64_t position) -> std::optional<Step> {
        if (position == 3) throw BadData("step 3 is bad");
        return one(position, position + 1);
      },
      0, 4);
  for (int64_t s = 0; s < 3; ++s) EXPECT_EQ(loader.next()->begin, s);
  EXPECT_THROW(loader.next(), BadData);
  EXPECT_THROW(loader.next(), BadData);
  EXPECT_EQ(loader.position(), 3);
}

TEST(Loader, ASourceThatDoesNotMoveIsABug) {
  Loader loader([](int64_t position) { return one(position, position); }, 0);
  EXPECT_THROW(loader.next(), Bug);
}

TEST(Loader, ABadPositionIsRefused) {
  const Dataset data = numbered(10);
  const Sampler sampler(data.train(), {.global_batch_size = 2, .epochs = 1});
  Loader loader(data, sampler, 99);
  EXPECT_THROW(loader.next(), BadData);
}

TEST(Loader, MakesNoMoreThanAsked) {
  std::atomic<int64_t> made{0};
  Loader loader(
      [&](int64_t position) -> std::optional<Step> {
        ++made;
        return one(position, position + 1);
      },
      0, 3);
  for (int64_t taken = 1; taken <= 200; ++taken) {
    ASSERT_TRUE(loader.next());
    ASSERT_LE(made, taken + 3);
  }
  while (made < 203) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(Loader, WaitingEndsWhenAskedToStop) {
  std::atomic<bool> stop{false}, go{false};
  Loader loader(
      [&](int64_t position) -> std::optional<Step> {
        go.wait(false);
        return one(position, position + 1);
      },
      0);
  std::jthread signal([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    stop = true;
  });
  EXPECT_FALSE(loader.next(&stop));
  EXPECT_EQ(loader.position(), 0);
  go = true;
  go.notify_all();
  EXPECT_EQ(loader.next(&stop).value_or(one(9, 9)).begin, 0);  // made before the flag is looked at again
}

TEST(Loader, EndsWhileItsThreadWaitsOrWorks) {
  for (int i = 0; i < 200; ++i) {
    Loader loader([](int64_t position) { return one(position, position + 1); }, 0, 1 + i % 3);
    for (int s = 0; s < i % 4; ++s) loader.next();
  }
}

}  // namespace
}  // namespace titanium
