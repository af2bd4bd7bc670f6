#include "titanium/schedule/print.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <vector>

#include "titanium/base/error.h"

namespace titanium {
namespace {

// Where a line of the printed plan ends: when the micro-batch or the direction changes.
struct Phase {
  int32_t micro_batch;
  bool backward;
  bool operator==(const Phase&) const = default;
};

std::optional<Phase> phase_of(const Action& action) {
  if (!is_compute(action.kind) && action.kind != Kind::kLoss) return std::nullopt;
  return Phase{action.micro_batch, action.kind != Kind::kForward && action.kind != Kind::kLoss};
}

// Belongs to the work before it; everything else prepares the work after it.
bool follows_work(const Action& action) {
  switch (action.kind) {
    case Kind::kReshard:
    case Kind::kOffload:
      return true;
    case Kind::kReduce:
    case Kind::kSendOutput:
    case Kind::kSendInputGrad:
      return action.half == Half::kStart;
    default:
      return false;
  }
}

// The phase that each action is printed with; none for what comes after all work.
std::vector<std::optional<Phase>> phases(const Plan& plan) {
  std::vector<std::optional<Phase>> result(plan.size());
  size_t open = 0;  // the first action that waits for the work after it
  for (size_t i = 0; i < plan.size(); ++i) {
    const auto phase = phase_of(plan[i]);
    if (!phase && !(follows_work(plan[i]) && open > 0)) continue;
    std::fill(result.begin() + open, result.begin() + i + 1, phase ? phase : result[open - 1]);
    open = i + 1;
  }
  return result;
}

[[noreturn]] void refuse(int line, std::string_view item, const char* reason) {
  std::string shown;
  for (const char c : item.substr(0, 60)) shown += std::isprint(static_cast<unsigned char>(c)) ? c : '?';
  throw BadData("plan, line {}: '{}': {}", line, shown, reason);
}

bool is_space(char c) {
  return c == ' ' || c == '\t' || c == '\r';
}

std::vector<std::string_view> words(std::string_view item) {
  std::vector<std::string_view> result;
  for (size_t i = 0; i < item.size();) {
    size_t end = i;
    while (end < item.size() && !is_space(item[end])) ++end;
    if (end > i) result.push_back(item.substr(i, end - i));
    i = end + 1;
  }
  return result;
}

std::optional<int32_t> index(std::string_view text) {
  int32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.front() == '-') return std::nullopt;
  return value;
}

std::optional<Kind> kind_of(std::string_view word) {
  for (int k = 0; k < kKindCount; ++k) {
    if (word == name(static_cast<Kind>(k))) return static_cast<Kind>(k);
  }
  return std::nullopt;
}

Action parse_action(int line, std::string_view item) {
  const std::vector<std::string_view> all = words(item);
  size_t next = 0;
  const auto take = [&] { return next < all.size() ? all[next++] : std::string_view(); };

  Action action;
  std::string_view word = take();
  if (word == ">" || word == ".") {
    action.half = word == ">" ? Half::kStart : Half::kWait;
    word = take();
  }
  const std::optional<Kind> kind = kind_of(word);
  if (!kind) refuse(line, item, "unknown action");
  action.kind = *kind;
  if (has_halves(*kind) && action.half == Half::kWhole) refuse(line, item, "needs `>` (start) or `.` (wait)");
  if (!has_halves(*kind) && action.half != Half::kWhole) refuse(line, item, "has no start and no wait");

  word = take();
  if (*kind != Kind::kLoss) {
    const std::optional<int32_t> number = index(word);
    if (!number) refuse(line, item, "needs the number of a block or unit");
    (names_unit(*kind) ? action.unit : action.block) = *number;
    word = take();
  }
  if (*kind == Kind::kForward && (word == "keep" || word == "drop")) {
    action.save = word == "keep" ? Save::kAll : Save::kInput;
    word = take();
  }
  if (!names_unit(*kind)) {
    action.micro_batch = 0;
    if (word.starts_with('@')) {
      const std::optional<int32_t> number = index(word.substr(1));
      if (!number) refuse(line, item, "needs the number of a micro-batch after @");
      action.micro_batch = *number;
      word = take();
    }
  }
  if (!word.empty()) refuse(line, item, "has a word too many");
  return action;
}

}  // namespace

std::string print_plan(const Plan& plan, int columns) {
  const bool several =
      std::any_of(plan.begin(), plan.end(), [](const Action& action) { return action.micro_batch > 0; });
  const auto phase = phases(plan);
  std::string text;
  size_t line_start = 0;
  for (size_t i = 0; i < plan.size(); ++i) {
    std::string item = to_string(plan[i]);
    if (!several) item = item.substr(0, item.find(" @"));
    if (i > 0 && phase[i] != phase[i - 1]) {
      text += '\n';
      line_start = text.size();
    } else if (i > 0 &&
               text.size() - line_start + 3 + item.size() > static_cast<size_t>(std::max(columns, 0))) {
      text += "\n";
      line_start = text.size();
      text += "  ";
    } else if (i > 0) {
      text += " | ";
    }
    text += item;
  }
  if (!text.empty()) text += '\n';
  return text;
}

Plan parse_plan(std::string_view text) {
  Plan plan;
  int line_number = 0;
  while (!text.empty()) {
    ++line_number;
    const size_t line_end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, line_end);
    text.remove_prefix(std::min(line_end + 1, text.size()));
    line = line.substr(0, line.find('#'));
    if (words(line).empty()) continue;
    for (size_t start = 0; start <= line.size();) {
      const size_t end = std::min(line.find('|', start), line.size());
      plan.push_back(parse_action(line_number, line.substr(start, end - start)));
      start = end + 1;
    }
  }
  return plan;
}

}  // namespace titanium
