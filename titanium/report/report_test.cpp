#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "titanium/base/error.h"
#include "titanium/report/files.h"
#include "titanium/report/format.h"
#include "titanium/report/jsonl.h"
#include "titanium/report/log.h"
#include "titanium/report/memory.h"
#include "titanium/report/progress.h"

namespace titanium {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

class Folder : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "titanium_report_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

std::string slurp(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

TEST(Format, Numbers) {
  EXPECT_EQ(human_number(0), "0");
  EXPECT_EQ(human_number(12), "12");
  EXPECT_EQ(human_number(999), "999");
  EXPECT_EQ(human_number(999.6), "1k");
  EXPECT_EQ(human_number(1234), "1.23k");
  EXPECT_EQ(human_number(134.515e6), "135M");
  EXPECT_EQ(human_number(1.5e9), "1.5G");
  EXPECT_EQ(human_number(-2500), "-2.5k");
  EXPECT_EQ(human_number(0.01234), "0.0123");
  EXPECT_EQ(human_number(1e-9), "1e-09");
  EXPECT_EQ(human_number(kNan), "nan");
  EXPECT_EQ(human_number(-kInf), "-inf");
}

TEST(Format, Durations) {
  EXPECT_EQ(human_duration(0), "0.00s");
  EXPECT_EQ(human_duration(0.524), "0.52s");
  EXPECT_EQ(human_duration(9.999), "10s");
  EXPECT_EQ(human_duration(12.4), "12s");
  EXPECT_EQ(human_duration(59.6), "1m00s");
  EXPECT_EQ(human_duration(185), "3m05s");
  EXPECT_EQ(human_duration(3599.6), "1h00m");
  EXPECT_EQ(human_duration(7620), "2h07m");
  EXPECT_EQ(human_duration(3 * 86400 + 4 * 3600), "3d04h");
  EXPECT_EQ(human_duration(-1), "?");
  EXPECT_EQ(human_duration(kNan), "?");
  EXPECT_EQ(human_duration(kInf), "?");
  EXPECT_EQ(human_duration(1e300), "?");
}

TEST(Format, Bytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1536), "1.50 KiB");
  EXPECT_EQ(human_bytes(1024 * 1024 - 1), "1.00 MiB");
  EXPECT_EQ(human_bytes(uint64_t{61} << 30), "61.00 GiB");
  EXPECT_EQ(human_bytes(std::numeric_limits<uint64_t>::max()), "16.00 EiB");
}

TEST(Memory, SeesAnAllocation) {
  constexpr size_t kBytes = size_t{64} << 20;
  const uint64_t before = rss_bytes();
  ASSERT_GT(before, uint64_t{1} << 20);
  auto* block = static_cast<char*>(
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
  ASSERT_NE(block, MAP_FAILED);
  for (size_t i = 0; i < kBytes; i += 4096) block[i] = 1;
  EXPECT_GT(rss_bytes(), before + kBytes / 2);
  ASSERT_EQ(munmap(block, kBytes), 0);
  EXPECT_LT(rss_bytes(), before + kBytes / 2);
  EXPECT_GT(peak_rss_bytes(), before + kBytes / 2);
  if (reset_peak_rss()) {
    EXPECT_LT(peak_rss_bytes(), before + kBytes / 2);
  }
}

TEST(ProgressText, EveryPart) {
  Progress p;
  p.step = 12;
  p.steps = 300;
  p.loss = 2.31449;
  p.lr = 1e-5;
  p.grad_norm = 1.2345;
  p.tokens_per_second = 410.4;
  p.mfu = 0.2314;
  p.memory_bytes = uint64_t{2252} << 20;
  p.eta_seconds = 185;
  EXPECT_EQ(
      progress_text(p),
      "step 12/300  loss 2.3145  lr 1.00e-05  grad 1.23  410 tok/s  MFU 23.1%  mem 2.20 GiB  ETA 3m05s");
  EXPECT_EQ(progress_text(Progress{}), "step 0  loss 0.0000  lr 0.00e+00  0 tok/s");
  p.loss = kNan;
  p.grad_norm = kInf;
  EXPECT_EQ(progress_text(p).substr(0, 49), "step 12/300  loss nan  lr 1.00e-05  grad inf  410");
}

TEST(EtaClock, LeavesOutTheFirstSteps) {
  EtaClock clock(2);
  clock.step_done(100);  // slow
  EXPECT_FALSE(clock.eta(10));
  clock.step_done(150);
  EXPECT_FALSE(clock.eta(10));
  clock.step_done(152);
  EXPECT_DOUBLE_EQ(*clock.eta(10), 20);
  clock.step_done(156);
  EXPECT_DOUBLE_EQ(*clock.eta(10), 30);
  EXPECT_DOUBLE_EQ(*clock.eta(0), 0);
}

TEST_F(Folder, ProgressLineRewritesOnATerminal) {
  const std::filesystem::path path = folder_ / "terminal";
  std::FILE* file = std::fopen(path.c_str(), "w");
  ASSERT_NE(file, nullptr);
  std::vector<std::string> lines;
  Progress p;
  {
    ProgressLine line(file, [&](const std::string& text) { lines.push_back(text); });
    line.finish();
    p.step = 1;
    line.show(p);
    p.step = 2;
    line.show(p);
    line.finish();
    line.finish();
    p.step = 3;
    line.show(p);
  }
  std::fclose(file);
  const std::string rest = "  loss 0.0000  lr 0.00e+00  0 tok/s\x1b[K";
  EXPECT_EQ(slurp(path), "\rstep 1" + rest + "\rstep 2" + rest + "\n\rstep 3" + rest + "\n");
  EXPECT_TRUE(lines.empty());

  ProgressLine plain(nullptr, [&](const std::string& text) { lines.push_back(text); });
  plain.show(p);
  plain.finish();
  EXPECT_EQ(lines, std::vector<std::string>{progress_text(p)});
}

TEST(MetricsJson, OrderAndValues) {
  EXPECT_EQ(metrics_json(3, {{"loss", 0.1}, {"tokens", int64_t{7}}, {"skipped", true}, {"note", "a\"\xff"}}),
            "{\"step\":3,\"loss\":0.1,\"tokens\":7,\"skipped\":true,\"note\":\"a\\\"\xef\xbf\xbd\"}");
  EXPECT_EQ(metrics_json(0, {{"a", kNan}, {"b", kInf}, {"c", -kInf}}),
            R"({"step":0,"a":"NaN","b":"Infinity","c":"-Infinity"})");
  EXPECT_THROW(metrics_json(0, {{"step", 1.0}}), Bug);
  // A double reads back as the same double.
  const double x = 0.1 + 0.2;
  EXPECT_EQ(nlohmann::json::parse(metrics_json(1, {{"x", x}}))["x"].get<double>(), x);
}

TEST_F(Folder, JsonlResumesAtAStep) {
  const std::filesystem::path path = folder_ / "run" / "metrics.jsonl";
  {
    JsonlMetrics metrics(path, std::nullopt);
    for (int64_t step = 1; step <= 4; ++step) {
      EXPECT_TRUE(metrics.write(step, {{"loss", static_cast<double>(step)}}));
      // Flushed: a reader sees each line at once.
      EXPECT_TRUE(slurp(path).ends_with(metrics_json(step, {{"loss", static_cast<double>(step)}}) + "\n"));
    }
  }
  std::ofstream(path, std::ios::app) << "not json\n[1]\n{\"step\":\"2\"}\n{\"step\":5,\"lo";
  {
    JsonlMetrics metrics(path, 2);
    EXPECT_EQ(metrics.dropped_lines(), 6);
    EXPECT_TRUE(metrics.write(3, {{"loss", 9.0}}));
  }
  EXPECT_EQ(slurp(path), "{\"step\":1,\"loss\":1.0}\n{\"step\":2,\"loss\":2.0}\n{\"step\":3,\"loss\":9.0}\n");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_ / "run"), {}), 1);

  { JsonlMetrics metrics(path, std::nullopt); }
  EXPECT_EQ(slurp(path), "");
}

TEST_F(Folder, JsonlRefusesAPathItCannotWrite) {
  std::ofstream(folder_ / "file") << "x";
  EXPECT_THROW(JsonlMetrics(folder_ / "file" / "metrics.jsonl", std::nullopt), BadConfig);
  EXPECT_THROW(JsonlMetrics(folder_, std::nullopt), BadConfig);
}

TEST(Files, AFullDiskTakesNothing) {
  const int full = open("/dev/full", O_WRONLY);
  ASSERT_GE(full, 0);
  EXPECT_FALSE(append_whole(full, "x"));
  close(full);
}

// A disk with room for a part of the record: the part is cut off again.
TEST_F(Folder, AHalfWrittenRecordIsCutOff) {
  const std::filesystem::path path = folder_ / "file";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{10, 10};
    setrlimit(RLIMIT_FSIZE, &limit);
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    const bool first = append_whole(fd, "12345\n"), second = append_whole(fd, "1234567\n"),
               third = append_whole(fd, "12\n");
    _exit(first && !second && third ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(slurp(path), "12345\n12\n");
}

TEST(Log, LinesPrefixesAndLevels) {
  std::vector<std::string> lines;
  LogOptions options;
  options.timestamps = false;
  options.sink = [&](std::string_view line) { lines.emplace_back(line); };
  {
    Log log(options);
    log.debug("hidden {}", 1);
    log.info("step {}", 2);
    log.warn("odd {}", "{}");
    log.error("bad");
    EXPECT_EQ(log.warnings(), 1);
  }
  EXPECT_EQ(lines, (std::vector<std::string>{"step 2", "warning: odd {}", "error: bad"}));

  lines.clear();
  options.rank = 3;
  options.world_size = 4;
  options.only_rank0 = true;
  {
    Log log(options);
    log.info("not here");
    log.warn("odd");
  }
  EXPECT_EQ(lines, std::vector<std::string>{"[rank 3] warning: odd"});

  lines.clear();
  options.level = LogLevel::kOff;
  Log silent(options);
  silent.warn("counted");
  EXPECT_EQ(silent.warnings(), 1);
  EXPECT_TRUE(lines.empty());
}

TEST(Log, TimestampsAndBeforeLine) {
  std::vector<std::string> lines;
  LogOptions options;
  options.sink = [&](std::string_view line) { lines.emplace_back(line); };
  Log log(options);
  log.set_before_line([&] { lines.emplace_back("before"); });
  log.info("x");
  log.debug("y");
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "before");
  ASSERT_EQ(lines[1].size(), std::string("2026-01-02 03:04:05 x").size());
  EXPECT_EQ(lines[1][4], '-');
  EXPECT_EQ(lines[1].substr(19), " x");
}

TEST(Log, ThreadsCountAndNeverMixLines) {
  std::vector<std::string> lines;
  LogOptions options;
  options.timestamps = false;
  options.sink = [&](std::string_view line) { lines.emplace_back(line); };
  Log log(options);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) log.warn("same");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(log.warnings(), 800);
  EXPECT_EQ(lines, std::vector<std::string>(800, "warning: same"));
}

// Two logs of one process share nothing.
TEST(Log, IsNotProcessWide) {
  int first = 0, second = 0;
  LogOptions options;
  options.sink = [&](std::string_view) { ++first; };
  Log a(options);
  options.sink = [&](std::string_view) { ++second; };
  options.level = LogLevel::kError;
  Log b(options);
  a.info("x");
  b.info("x");
  b.error("x");
  EXPECT_EQ(first, 1);
  EXPECT_EQ(second, 1);
}

}  // namespace
}  // namespace titanium
