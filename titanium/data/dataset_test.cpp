#include "titanium/data/dataset.h"

#include <gtest/gtest.h>

#include <barrier>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/base/random.h"
#include "titanium/batch/weights.h"
#include "titanium/data/test_files.h"

namespace titanium {
namespace {

DataOptions options_for(std::vector<std::string> files) {
  DataOptions options;
  options.files = std::move(files);
  options.vocab_size = 1 << 20;
  options.max_tokens_key = "training.seq_len";
  return options;
}

Dataset load(const DataOptions& options) {
  return Dataset::load(options, nullptr, nullptr);
}

// The message of the error of a kind that loading gives.
template <typename E>
std::string complaint(const DataOptions& options) {
  try {
    load(options);
  } catch (const E& e) {
    return e.what();
  } catch (const std::exception& e) {
    return std::string("another error: ") + e.what();
  }
  return "no error";
}

int64_t rejected(const Dataset& data, Reject reason) {
  return data.summary().rejected[static_cast<size_t>(reason)];
}

// What a reader gets, or its error, of several that are threads.
struct Read {
  std::optional<Dataset> data;
  std::string error;
};
std::vector<Read> read_together(int size, const std::function<DataOptions(int rank)>& options) {
  std::vector<Read> out(static_cast<size_t>(size));
  std::vector<std::string> said(static_cast<size_t>(size));
  std::barrier<> meet(size);
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        const auto exchange = [&](const std::string& mine) {
          said[static_cast<size_t>(rank)] = mine;
          meet.arrive_and_wait();
          const std::vector<std::string> all = said;
          meet.arrive_and_wait();
          return all;
        };
        try {
          out[static_cast<size_t>(rank)].data = Dataset::load(
              options(rank), nullptr, nullptr, {.rank = rank, .size = size, .exchange = exchange});
        } catch (const Error& e) {
          out[static_cast<size_t>(rank)].error = fmt::format("{}: {}", name(e.kind()), e.what());
        }
      });
    }
  }
  return out;
}

TEST(Dataset, SeveralReadersHaveTheDataSetOfOne) {
  const TestFolder folder("dataset");
  std::string many = numbered_records(20'000);
  many.insert(many.find('\n', many.size() / 2) + 1, "{\"nothing\": 1}\n");
  DataOptions options =
      options_for({folder.write("a.jsonl", many), folder.write("b.jsonl", numbered_records(5))});
  options.on_bad = OnBad::kSkip;
  options.validation_split = 0.1;
  options.max_tokens = 7;
  options.on_long = OnLong::kTruncate;
  const Dataset want = load(options);
  EXPECT_GT(want.summary().truncated, 0);
  for (const int size : {2, 3}) {
    for (const Read& read : read_together(size, [&](int) { return options; })) {
      ASSERT_TRUE(read.data) << read.error;
      EXPECT_EQ(read.data->fingerprint(), want.fingerprint());
      EXPECT_EQ(read.data->summary().text(), want.summary().text());
      EXPECT_EQ(read.data->train(), want.train());
      ASSERT_EQ(read.data->size(), want.size());
      for (int64_t i = 0; i < want.size(); i += 97) {
        EXPECT_EQ(read.data->sample(i).ids, want.sample(i).ids);
        EXPECT_EQ(read.data->sample(i).loss_mask, want.sample(i).loss_mask);
      }
    }
  }
  // The first bad record in the order of the files, wherever it is read.
  options.on_bad = OnBad::kFail;
  many.insert(many.rfind('\n', many.size() - 2) + 1, "{\"another\": 1}\n");
  options.files = {folder.write("c.jsonl", many)};
  const std::string error = complaint<Error>(options);
  for (const Read& read : read_together(3, [&](int) { return options; }))
    EXPECT_EQ(read.error, "BadData: " + error);
}

TEST(Dataset, ReadersOfDifferentFilesAreTold) {
  const TestFolder folder("dataset");
  const auto a = folder.write("a.jsonl", numbered_records(300)),
             b = folder.write("b.jsonl", numbered_records(301));
  for (const Read& read : read_together(2, [&](int rank) { return options_for({rank == 0 ? a : b}); }))
    EXPECT_NE(read.error.find("BadConfig: the data files of rank 1 are not those of rank 0"),
              std::string::npos)
        << read.error;
  for (const Read& read :
       read_together(2, [&](int rank) { return options_for({rank == 0 ? a : a + ".none"}); }))
    EXPECT_NE(read.error.find("BadData: " + a + ".none"), std::string::npos) << read.error;
}

TEST(Dataset, HoldsWhatTheFilesSay) {
  const TestFolder folder("dataset");
  const auto a = folder.write("a.jsonl", numbered_records(300));
  const auto b = folder.write(
      "b.jsonl", "{\"input_ids\": [7, 8, 9], \"loss_mask\": [1, 0, 1]}\r\n\n{\"input_ids\": [4]}");
  const Dataset data = load(options_for({a, b}));
  ASSERT_EQ(data.size(), 302);
  int64_t tokens = 0, trained = 0;
  for (int64_t i = 0; i < 300; ++i) {
    const Sample sample = data.sample(i);
    const int64_t n = 2 + i % 7;
    ASSERT_EQ(sample.size(), n);
    ASSERT_EQ(data.length(i), n);
    ASSERT_EQ(sample.ids[0], i);
    for (int64_t t = 1; t < n; ++t) ASSERT_EQ(sample.ids[static_cast<size_t>(t)], t);
    ASSERT_EQ(sample.loss_mask[0], 0);
    ASSERT_EQ(trained_tokens(sample), n - 1);
    tokens += n;
    trained += n - 1;
  }
  EXPECT_EQ(data.sample(300).ids, (std::vector<int32_t>{7, 8, 9}));
  EXPECT_EQ(data.sample(300).loss_mask, (std::vector<uint8_t>{1, 0, 1}));
  EXPECT_EQ(data.sample(301).ids, (std::vector<int32_t>{4}));
  EXPECT_THROW(data.sample(302), Bug);
  const DataSummary& summary = data.summary();
  EXPECT_EQ(summary.lines, 302);
  EXPECT_EQ(summary.records, 302);
  EXPECT_EQ(summary.tokens, tokens + 4);
  EXPECT_EQ(summary.trained, trained + 1);
  EXPECT_EQ(summary.longest, 8);
  EXPECT_EQ(summary.untrained, 1);  // one token alone: there is nothing to predict it from
  EXPECT_NE(summary.text().find(fmt::format("{} of {} tokens have loss", trained + 1, tokens + 4)),
            std::string::npos)
      << summary.text();
  EXPECT_EQ(data.train().size(), 302u);
  EXPECT_TRUE(data.validation().empty());
}

// More than one word of the mask in a record, and records that start inside a word.
TEST(Dataset, MasksAreKeptBitByBit) {
  const TestFolder folder("masks");
  const Random random(1, Purpose::kTest);
  std::string text;
  std::vector<std::vector<uint8_t>> masks;
  uint64_t draw = 0;
  for (int i = 0; i < 400; ++i) {
    std::string ids, bits;
    masks.emplace_back();
    for (auto n = 1 + random.below(draw++, 200); n > 0; --n) {
      masks.back().push_back(random.below(draw++, 2) != 0);
      ids += fmt::format("{}{}", ids.empty() ? "" : ",", n);
      bits += fmt::format("{}{}", bits.empty() ? "" : ",", masks.back().back());
    }
    text += fmt::format("{{\"input_ids\":[{}],\"loss_mask\":[{}]}}\n", ids, bits);
  }
  const Dataset data = load(options_for({folder.write("a.jsonl", text)}));
  for (int64_t i = 0; i < 400; ++i) ASSERT_EQ(data.sample(i).loss_mask, masks[static_cast<size_t>(i)]);
  // 4 bytes and a bit a token, and little more.
  EXPECT_LT(static_cast<double>(data.memory_bytes()),
            4.2 * static_cast<double>(data.summary().tokens) + 40.0 * 400);
}

TEST(Dataset, ThreadsDoNotMatter) {
  const TestFolder folder("threads");
  std::string text = numbered_records(3000);
  text += "{\"text\": 5}\n" + numbered_records(500) + "{\n";
  auto options = options_for({folder.write("a.jsonl", text)});
  options.on_bad = OnBad::kSkip;
  options.validation_split = 0.1;
  options.seed = 4;
  options.threads = 1;
  const Dataset one = load(options);
  EXPECT_EQ(one.size(), 3500);
  for (int threads : {2, 3, 8}) {
    options.threads = threads;
    const Dataset many = load(options);
    EXPECT_EQ(many.fingerprint(), one.fingerprint());
    EXPECT_EQ(many.validation(), one.validation());
    EXPECT_EQ(many.summary().text(), one.summary().text());
  }
  // The first bad record of the file is named, whatever thread meets one first.
  options.on_bad = OnBad::kFail;
  for (int threads : {1, 2, 8}) {
    options.threads = threads;
    const auto message = complaint<BadData>(options);
    EXPECT_NE(message.find("a.jsonl:3001: field 'text'"), std::string::npos) << message;
  }
}

TEST(Dataset, BadRecordsFailOrAreCounted) {
  const TestFolder folder("bad");
  auto options = options_for({folder.write("a.jsonl",
                                           "{\"input_ids\": [1, 2]}\n"
                                           "\n"
                                           "{\"input_ids\": [1, -2]}\n"
                                           "not json\n"
                                           "{\"input_ids\": []}\n"
                                           "{\"input_ids\": [3, 4]}\n")});
  EXPECT_NE(complaint<BadData>(options).find("a.jsonl:3: field 'input_ids[1]' is -2"), std::string::npos);
  options.on_bad = OnBad::kSkip;
  const Dataset data = load(options);
  EXPECT_EQ(data.size(), 2);
  EXPECT_EQ(data.summary().lines, 5);
  EXPECT_EQ(rejected(data, Reject::kField), 1);
  EXPECT_EQ(rejected(data, Reject::kJson), 1);
  EXPECT_EQ(rejected(data, Reject::kEmpty), 1);
  const auto text = data.summary().text();
  EXPECT_NE(text.find("3 records left out (json 1, field 1, empty 1), the first: "), std::string::npos)
      << text;
  EXPECT_NE(text.find("a.jsonl:3"), std::string::npos) << text;
}

TEST(Dataset, LongRecordsFailOrAreTruncatedOrDropped) {
  const TestFolder folder("long");
  auto options =
      options_for({folder.write("a.jsonl",
                                "{\"input_ids\": [1, 2]}\n"
                                "{\"input_ids\": [1, 2, 3, 4, 5], \"loss_mask\": [0, 0, 0, 1, 1]}\n")});
  options.max_tokens = 3;
  options.on_bad = OnBad::kSkip;  // a record that is too long is not a bad record
  const auto message = complaint<BadData>(options);
  EXPECT_NE(message.find("a.jsonl:2: the record has 5 tokens, more than training.seq_len = 3"),
            std::string::npos)
      << message;

  options.on_long = OnLong::kTruncate;
  const Dataset cut = load(options);
  EXPECT_EQ(cut.sample(1).ids, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(cut.summary().truncated, 1);
  EXPECT_EQ(cut.summary().dropped_tokens, 2);
  EXPECT_EQ(cut.summary().untrained, 1);
  EXPECT_NE(cut.summary().text().find("1 records truncated by 2 tokens; 1 records have no token with loss"),
            std::string::npos)
      << cut.summary().text();

  options.on_long = OnLong::kDrop;
  options.on_bad = OnBad::kFail;
  const Dataset dropped = load(options);
  EXPECT_EQ(dropped.size(), 1);
  EXPECT_EQ(rejected(dropped, Reject::kLength), 1);

  options.max_tokens = 5;
  options.on_long = OnLong::kFail;
  EXPECT_EQ(load(options).size(), 2);
  EXPECT_EQ(on_long_from("drop"), OnLong::kDrop);
  EXPECT_EQ(on_bad_from("skip"), OnBad::kSkip);
  EXPECT_THROW(on_long_from("cut"), BadConfig);
  EXPECT_THROW(on_bad_from("ignore"), BadConfig);
}

TEST(Dataset, NothingToTrainOnIsRefused) {
  const TestFolder folder("empty");
  const auto empty = folder.write("empty.jsonl", "\n\n");
  EXPECT_EQ(complaint<BadData>(options_for({empty})), empty + ": the data have no records (size: 2 bytes)");
  auto options = options_for({folder.write("bad.jsonl", "{}\n{}\n")});
  options.on_bad = OnBad::kSkip;
  EXPECT_NE(complaint<BadData>(options).find("no record is left"), std::string::npos);
  EXPECT_NE(complaint<BadData>(options_for({folder.path("missing.jsonl")})).find("missing.jsonl"),
            std::string::npos);
  EXPECT_NE(complaint<BadConfig>(options_for({})).find("no data file"), std::string::npos);

  auto split = options_for({folder.write("one.jsonl", "{\"input_ids\": [1, 2]}\n")});
  split.validation_split = 0.5;
  EXPECT_NE(complaint<BadData>(split).find("validation_split = 0.5 of 1 records"), std::string::npos);
  for (double bad : {-0.1, 1.0, std::nan("")}) {
    split.validation_split = bad;
    EXPECT_NE(complaint<BadConfig>(split).find("validation_split"), std::string::npos);
  }
}

TEST(Dataset, TheSplitIsAFunctionOfSeedAndRecord) {
  const TestFolder folder("split");
  const std::string text = numbered_records(4000);
  auto options = options_for({folder.write("a.jsonl", text)});
  options.validation_split = 0.2;
  options.seed = 7;
  const auto held_out = [](const Dataset& data) {
    std::vector<int32_t> first;  // the record's number, which is its first token
    for (int64_t record : data.validation()) first.push_back(data.sample(record).ids[0]);
    return first;
  };
  const Dataset data = load(options);
  const auto validation = held_out(data);
  EXPECT_NEAR(static_cast<double>(validation.size()), 800, 5 * std::sqrt(4000 * 0.2 * 0.8));
  EXPECT_EQ(data.train().size() + data.validation().size(), 4000u);
  EXPECT_TRUE(std::is_sorted(data.train().begin(), data.train().end()));

  // More records, before and after: those that were there stay where they were.
  auto more = options;
  more.files = {
      folder.write("b.jsonl", "{\"input_ids\": [90001, 1]}\n\n" + text + "{\"input_ids\": [90002, 1]}\n")};
  auto again = held_out(load(more));
  std::erase_if(again, [](int32_t id) { return id > 90000; });
  EXPECT_EQ(again, validation);

  // A line that is there twice is on one side.
  auto twice = options;
  twice.files = {options.files[0], options.files[0]};
  auto doubled = validation;
  doubled.insert(doubled.end(), validation.begin(), validation.end());
  EXPECT_EQ(held_out(load(twice)), doubled);

  options.seed = 8;
  EXPECT_NE(held_out(load(options)), validation);
}

TEST(Dataset, TheFingerprintSeesEveryChange) {
  const TestFolder folder("print");
  const auto print = [&](const std::string& text) {
    return load(options_for({folder.write("a.jsonl", text)})).fingerprint();
  };
  const auto base = print("{\"input_ids\": [1, 2]}\n{\"input_ids\": [3, 4]}\n");
  EXPECT_EQ(print("{\"input_ids\": [1, 2], \"id\": 9}\r\n\n{\"input_ids\": [3, 4]}"), base);
  EXPECT_NE(print("{\"input_ids\": [3, 4]}\n{\"input_ids\": [1, 2]}\n"), base);
  EXPECT_NE(print("{\"input_ids\": [1, 2]}\n{\"input_ids\": [3, 5]}\n"), base);
  EXPECT_NE(print("{\"input_ids\": [1, 2], \"loss_mask\": [1, 0]}\n{\"input_ids\": [3, 4]}\n"), base);
  EXPECT_NE(print("{\"input_ids\": [1, 2, 3, 4]}\n"), base);
  EXPECT_NE(print("{\"input_ids\": [1, 2]}\n"), base);
}

// The split is of the lines' bytes, so the same records written otherwise are other parts.
TEST(Dataset, TheFingerprintSeesTheSplit) {
  const TestFolder folder("resplit");
  std::string dense, spaced;
  for (int i = 0; i < 100; ++i) {
    dense += fmt::format("{{\"input_ids\":[{},1]}}\n", i);
    spaced += fmt::format("{{\"input_ids\": [{}, 1]}}\n", i);
  }
  auto options = options_for({folder.write("dense.jsonl", dense)});
  auto again = options_for({folder.write("spaced.jsonl", spaced)});
  EXPECT_EQ(load(options).fingerprint(), load(again).fingerprint());
  options.validation_split = again.validation_split = 0.3;
  const Dataset one = load(options), other = load(again);
  EXPECT_NE(one.validation(), other.validation());
  EXPECT_NE(one.fingerprint(), other.fingerprint());
  EXPECT_EQ(load(options).fingerprint(), one.fingerprint());
}

// A whole batch without a trained token weighs nothing, and nothing is NaN.
TEST(Dataset, AllMaskedRecordsAreKeptAndCounted) {
  const TestFolder folder("masked");
  const Dataset data = load(options_for({folder.write("a.jsonl",
                                                      "{\"input_ids\": [1, 2], \"loss_mask\": [0, 0]}\n"
                                                      "{\"input_ids\": [3, 4], \"loss_mask\": [1, 0]}\n")}));
  EXPECT_EQ(data.size(), 2);
  EXPECT_EQ(data.summary().untrained, 2);
  EXPECT_EQ(data.summary().trained, 0);
  std::vector<Sample> samples{data.sample(0), data.sample(1)};
  const Counts counts = count(samples);
  EXPECT_EQ(counts, (Counts{0, 0, 2}));
  for (const auto& w : weigh_all(samples, Averaging::kTokenMean, counts)) {
    EXPECT_EQ(w.weight, (std::vector<double>{0, 0}));
  }
}

TEST(Dataset, TextNeedsATokenizer) {
  const TestFolder folder("text");
  for (const char* record : {"{\"text\": \"a\"}", "{\"prompt\": \"a\", \"response\": \"b\"}",
                             "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}"}) {
    auto options = options_for({folder.write("a.jsonl", record)});
    options.on_bad = OnBad::kSkip;  // a wrong set-up is not a bad record
    EXPECT_NE(complaint<BadConfig>(options).find("tokenizer"), std::string::npos);
  }
  auto options = options_for({folder.write("a.jsonl", "{\"input_ids\": [1, 2]}")});
  options.vocab_size = 0;
  EXPECT_NE(complaint<BadConfig>(options).find("vocabulary"), std::string::npos);
}

}  // namespace
}  // namespace titanium
