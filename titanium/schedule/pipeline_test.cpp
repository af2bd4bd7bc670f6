#include "titanium/schedule/pipeline.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "titanium/base/error.h"

namespace titanium {
namespace {

std::string text_of(const PipelineOrder& order) {
  std::string text;
  for (const auto& rank : order.ranks) {
    for (const StageAction& a : rank) text += to_string(a) + ' ';
    text += '\n';
  }
  return text;
}

int32_t stages_per_rank(const PipelineSchedule& schedule, int32_t wanted) {
  return schedule.one_stage ? 1 : schedule.placement == StagePlacement::kV ? 2 : wanted;
}

const char* const kNames[] = {
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"};

// tests/data/pipelines: what PyTorch 2.15's schedules of the same names make, as its CSV.
TEST(Pipeline, OrdersArePyTorchs) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(TITANIUM_SOURCE_DIR "/tests/data/pipelines")) {
    const std::string stem = entry.path().stem();  // name_ranksxstages_microbatches
    const size_t first = stem.find('_'), x = stem.find('x', first), second = stem.rfind('_');
    const int32_t ranks = std::stoi(stem.substr(first + 1)), local = std::stoi(stem.substr(x + 1)),
                  micro_batches = std::stoi(stem.substr(second + 1));
    std::stringstream text;
    text << std::ifstream(entry.path()).rdbuf();
    const PipelineOrder theirs = read_pipeline_csv(text.str(), stem, ranks, micro_batches);
    const PipelineOrder ours = pipeline_order(stem.substr(0, first), ranks, local, micro_batches);
    EXPECT_EQ(text_of(ours), text_of(theirs)) << stem;
    EXPECT_EQ(ours.rank_of, theirs.rank_of) << stem;
    ++files;
  }
  EXPECT_GE(files, 20);
}

TEST(Pipeline, OfOneStageARank) {
  EXPECT_EQ(text_of(pipeline_order("GPipe", 2, 1, 3)),
            "0F0 0F1 0F2 0B0 0B1 0B2 \n"
            "1F0 1F1 1F2 1B0 1B1 1B2 \n");
  EXPECT_EQ(text_of(pipeline_order("1f1b", 3, 1, 4)),
            "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 \n"
            "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 \n"
            "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 \n");
}

// Every number of ranks, stages and micro-batches: all work is there once, and it ends.
TEST(Pipeline, AnyNumbers) {
  for (const char* name : kNames) {
    for (int32_t ranks = 1; ranks <= 6; ++ranks) {
      for (int32_t wanted = 2; wanted <= 4; ++wanted) {
        const int32_t local = stages_per_rank(pipeline_schedule(name), wanted);
        for (int32_t m = 1; m <= 14; ++m) {
          const PipelineOrder order = pipeline_order(name, ranks, local, m);
          ASSERT_EQ(order.stages(), ranks * local);
          std::multiset<std::string> work, wanted_work;
          for (int32_t r = 0; r < ranks; ++r) {
            for (const StageAction& a : order.ranks[r]) {
              ASSERT_EQ(order.rank_of[a.stage], r);
              if (a.kind == StageKind::kBackward) {
                work.insert(to_string({StageKind::kBackwardInput, a.stage, a.micro_batch}));
                work.insert(to_string({StageKind::kBackwardWeight, a.stage, a.micro_batch}));
              } else {
                work.insert(to_string(a));
              }
            }
          }
          for (int32_t s = 0; s < order.stages(); ++s) {
            for (int32_t i = 0; i < m; ++i) {
              for (const StageKind kind :
                   {StageKind::kForward, StageKind::kBackwardInput, StageKind::kBackwardWeight})
                wanted_work.insert(to_string({kind, s, i}));
            }
          }
          ASSERT_EQ(work, wanted_work) << name << ' ' << ranks << ' ' << local << ' ' << m;
          const PipelineTime all = time_pipeline(order), forwards = time_pipeline(forwards_of(order));
          for (int32_t r = 0; r < ranks; ++r) {
            ASSERT_EQ(all.busy[r], 3.0 * local * m) << name << ' ' << ranks << ' ' << local << ' ' << m;
            ASSERT_EQ(forwards.busy[r], local * m) << name << ' ' << ranks << ' ' << local << ' ' << m;
          }
          // The last micro-batch cannot be out before it has gone through every stage.
          ASSERT_GE(forwards.total, order.stages() + m - 1);
          ASSERT_GE(all.total, 2 * order.stages() + m - 1);
        }
      }
    }
  }
}

// The published shares of idle time, with F = I = W: of p ranks, v stages a rank, m micro-batches.
TEST(Pipeline, BubblesAreThePublishedOnes) {
  for (const int32_t p : {2, 4, 8}) {
    for (const int32_t m : {p, 2 * p, 4 * p}) {
      const auto bubble = [&](const char* name, int32_t v) {
        return time_pipeline(pipeline_order(name, p, v, m)).bubble();
      };
      const double n = p - 1;
      EXPECT_NEAR(bubble("GPipe", 1), n / (m + n), 1e-12);
      EXPECT_NEAR(bubble("1F1B", 1), n / (m + n), 1e-12);
      for (const int32_t v : {2, 4}) {
        EXPECT_NEAR(bubble("Interleaved1F1B", v), n / (v * m + n), 1e-12) << p << ' ' << v << ' ' << m;
        EXPECT_NEAR(bubble("LoopedBFS", v), n / (v * m + n), 1e-12) << p << ' ' << v << ' ' << m;
      }
      // Qi et al.: (p - 1)(F + I - W), the way of the first forward; of DualPipeV (p - 1)(F&B + B - 3 W), an
      // overlapped pair F&B as long as its backward.
      EXPECT_NEAR(bubble("InterleavedZeroBubble", 2), n / (6.0 * m + n), 1e-12) << p << ' ' << m;
      if (m < 2 * p) continue;
      EXPECT_NEAR(bubble("ZBVZeroBubble", 2), n / (6.0 * m + n), 1e-12) << p << ' ' << m;
      EXPECT_NEAR(bubble("DualPipeV", 2), n / (6.0 * m + n), 1e-12) << p << ' ' << m;
    }
  }
}

std::string refusal(const std::string& text, int32_t ranks = 2, int32_t micro_batches = 1) {
  try {
    read_pipeline_csv(text, "order.csv", ranks, micro_batches);
  } catch (const BadConfig& e) {
    return e.what();
  }
  return "taken";
}

TEST(PipelineCsv, WithCommunicationsAndSpaces) {
  const PipelineOrder order = read_pipeline_csv(
      "0UNSHARD, 0F0 ,0SEND_F0,,0RECV_B0,0I0,0W0,0REDUCE_GRAD\r\n1RECV_F0,\"1F0\",1B0,1SEND_B0\n\n",
      "order.csv", 2, 1);
  EXPECT_EQ(text_of(order), "0F0 0I0 0W0 \n1F0 1B0 \n");
}

TEST(PipelineCsv, FewerMicroBatchesThanItHas) {
  EXPECT_EQ(text_of(read_pipeline_csv("0F0,0F1,0B0,0B1\n", "order.csv", 1, 1)), "0F0 0B0 \n");
}

TEST(PipelineCsv, MoreMicroBatchesThanItHas) {
  EXPECT_EQ(text_of(read_pipeline_csv("0F0,0F1,0B0,0B1\n", "order.csv", 1, 5)),
            "0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3 0F4 0B4 \n");
}

TEST(PipelineCsv, RefusalsNameTheCell) {
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(refusal("0F0,0B0\n1F0,1X0\n"), "line 2, cell 2: '1X0'");
  has(refusal("0F0,0B0\n1F0,1B\n"), "line 2, cell 2");
  has(refusal("0F0,(0B0;\n1F0,1B0\n"), "line 1, cell 2");
  has(refusal("0F99999999999,0B0\n1F0,1B0\n"), "line 1, cell 1");
  has(refusal("0F0,0B0\n"), "1 lines");
  has(refusal("0F0,0B0\n2F0,2B0\n"), "stage 1 is missing");
  has(refusal("0F0,0B0\n0F0,1F0,1B0\n"), "on rank 0 and on rank 1");
  has(refusal("0F0,0B0,0F0\n1F0,1B0\n"), "0F0 is there twice");
  has(refusal("0F0,1F0,1B0,0B0\n0SEND_F0\n"), "rank 1 has no stage");
  has(refusal("0UNSHARD\n0F0,1F0,1B0,0B0\n"), "rank 0 has no stage");
  has(refusal("0F0,0I0\n1F0,1B0\n"), "stage 0, micro-batch 0");
  has(refusal("0B0,0F0\n1F0,1B0\n"), "wait for each other");
  has(refusal("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n", 2, 2), "taken");
}

TEST(Pipeline, RefusalsNameTheKey) {
  const auto has = [](const auto& make, const char* part) {
    try {
      make();
      FAIL();
    } catch (const BadConfig& e) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  has([] { pipeline_schedule("2F2B"); }, "pipeline_parallel_schedule = 2F2B: allowed: GPipe, 1F1B");
  has([] { pipeline_order("1F1B", 2, 2, 4); }, "each rank has 2 stages of the model; 1F1B needs 1");
  has([] { pipeline_order("Interleaved1F1B", 2, 1, 4); }, "needs 2 or more");
  has([] { pipeline_order("DualPipeV", 2, 4, 8); }, "needs 2 (");
}

}  // namespace
}  // namespace titanium
