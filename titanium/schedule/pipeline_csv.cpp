#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>

#include "titanium/base/error.h"
#include "titanium/schedule/pipeline.h"

namespace titanium {
namespace {

constexpr int32_t kMost = 1 << 16;  // stages, micro-batches

std::string_view trimmed(std::string_view text) {
  const auto blank = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '"'; };
  while (!text.empty() && blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && blank(text.back())) text.remove_suffix(1);
  return text;
}

std::optional<int32_t> take_number(std::string_view& text) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data() || value < 0 || value >= kMost) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

std::vector<std::string_view> split(std::string_view text, char by) {
  std::vector<std::string_view> parts;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find(by, start), text.size());
    parts.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return parts;
}

// What is neither compute nor unknown: it says nothing that an order needs.
bool is_other(std::string_view word) {
  for (const char* name : {"UNSHARD", "WAIT_UNSHARD", "RESHARD", "SEND_F", "RECV_F", "SEND_B", "RECV_B",
                           "WAIT_SEND_F", "WAIT_SEND_B", "REDUCE_GRAD", "WAIT_REDUCE_GRAD"}) {
    if (word == name) return true;
  }
  return false;
}

class Reader {
 public:
  Reader(std::string_view file, int32_t micro_batches) : file_(file), micro_batches_(micro_batches) {}

  void line(int number, std::string_view text) {
    line_ = number;
    std::vector<StageAction>& order = order_.ranks.emplace_back();
    int column = 0;
    for (const std::string_view cell : split(text, ',')) {
      ++column;
      read(trimmed(cell), column, order);
    }
  }

  PipelineOrder finish(int32_t ranks) {
    if (static_cast<int32_t>(order_.ranks.size()) != ranks)
      refuse(fmt::format("{} lines, one a rank: the pipeline has {} ranks", order_.ranks.size(), ranks));
    std::map<int32_t, int32_t> rank_of;
    for (int32_t r = 0; r < ranks; ++r) {
      if (order_.ranks[r].empty()) refuse(fmt::format("rank {} has no stage", r));
      for (const StageAction& a : order_.ranks[r]) {
        const int32_t owner = rank_of.try_emplace(a.stage, r).first->second;
        if (owner != r) refuse(fmt::format("stage {} is on rank {} and on rank {}", a.stage, owner, r));
      }
    }
    for (const auto& [stage, rank] : rank_of) {
      if (stage != order_.stages()) refuse(fmt::format("stage {} is missing", order_.stages()));
      order_.rank_of.push_back(rank);
    }
    check_complete();
    for (auto& rank : order_.ranks) repeat(rank);
    try {
      time_pipeline(order_);
    } catch (const Bug& e) {
      refuse(e.what());
    }
    return std::move(order_);
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw BadConfig("pipeline_parallel_schedule_csv: {}: {}", file_, reason);
  }
  [[noreturn]] void refuse_cell(int column, std::string_view cell) const {
    std::string shown;
    for (const char c : cell.substr(0, 40)) shown += c >= ' ' && c < 127 ? c : '?';
    throw BadConfig(
        "pipeline_parallel_schedule_csv: {}, line {}, cell {}: '{}': allowed: a stage, F, B, I or W, and a "
        "micro-batch, such as 2F0",
        file_, line_, column, shown);
  }

  void read(std::string_view cell, int column, std::vector<StageAction>& order) {
    if (cell.empty()) return;
    if (cell.front() == '(') {  // (0F1;3B0)OVERLAP_F_B
      const size_t end = cell.find(')');
      if (end == cell.npos || cell.substr(end + 1) != "OVERLAP_F_B") refuse_cell(column, cell);
      for (const std::string_view part : split(cell.substr(1, end - 1), ';')) {
        if (trimmed(part).empty() || part.front() == '(') refuse_cell(column, cell);
        read(trimmed(part), column, order);
      }
      return;
    }
    std::string_view rest = cell;
    const std::optional<int32_t> stage = take_number(rest);
    if (!stage) refuse_cell(column, cell);
    const size_t digits = std::min(rest.find_first_of("0123456789"), rest.size());
    const std::string_view word = rest.substr(0, digits);
    rest.remove_prefix(digits);
    const bool numbered = !rest.empty();
    const std::optional<int32_t> micro_batch = numbered ? take_number(rest) : 0;
    if (!micro_batch || !rest.empty()) refuse_cell(column, cell);
    if (is_other(word)) return;
    const std::string_view letters = "FBIW";
    const size_t kind = word.size() == 1 ? letters.find(word[0]) : letters.npos;
    if (kind == letters.npos || !numbered) refuse_cell(column, cell);
    order.push_back({static_cast<StageKind>(kind), *stage, *micro_batch});
  }

  void check_complete() {
    std::map<std::pair<int32_t, int32_t>, std::array<int, 4>> seen;
    int32_t given = 0;
    for (const auto& rank : order_.ranks) {
      for (const StageAction& a : rank) {
        given = std::max(given, a.micro_batch + 1);
        if (++seen[{a.stage, a.micro_batch}][static_cast<size_t>(a.kind)] > 1)
          refuse(fmt::format("{} is there twice", to_string(a)));
      }
    }
    given_ = given;
    for (int32_t s = 0; s < order_.stages(); ++s) {
      for (int32_t m = 0; m < given; ++m) {
        const auto found = seen.find({s, m});
        const std::array<int, 4> n = found == seen.end() ? std::array<int, 4>{} : found->second;
        if (n[0] != 1 || n[1] + n[2] != 1 || n[2] != n[3])
          refuse(
              fmt::format("stage {}, micro-batch {}: one F and one B, or one I and one W, are needed", s, m));
      }
    }
  }

  // In rounds, the last of which may be cut.
  void repeat(std::vector<StageAction>& order) const {
    const std::vector<StageAction> round = std::move(order);
    order.clear();
    for (int32_t before = 0; before < micro_batches_; before += given_) {
      for (StageAction a : round) {
        a.micro_batch += before;
        if (a.micro_batch < micro_batches_) order.push_back(a);
      }
    }
  }

  std::string file_;
  int32_t micro_batches_, given_ = 0;  // of the plan, of the file
  int line_ = 0;
  PipelineOrder order_;
};

}  // namespace

PipelineOrder read_pipeline_csv(std::string_view text, std::string_view file, int32_t ranks,
                                int32_t micro_batches) {
  Reader reader(file, micro_batches);
  int number = 0;
  for (const std::string_view line : split(text, '\n')) {
    ++number;
    if (!trimmed(line).empty()) reader.line(number, line);
  }
  return reader.finish(ranks);
}

}  // namespace titanium
