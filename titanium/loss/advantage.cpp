#include "titanium/loss/advantage.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "titanium/base/error.h"
#include "titanium/loss/advantage_rows.h"

namespace titanium {
namespace {

// Scores of the rows of one group.
struct Group {
  std::vector<size_t> rows;
  double mean = 0, deviation = 0;  // n - 1 form; mean 0 and deviation 1 of a single row
};

std::map<int64_t, Group> groups_of(const RewardRows& rows, const std::vector<double>& scores) {
  std::map<int64_t, Group> groups;
  for (size_t b = 0; b < scores.size(); ++b) groups[rows.group[b]].rows.push_back(b);
  for (auto& [number, group] : groups) {
    const double n = static_cast<double>(group.rows.size());
    if (group.rows.size() == 1) {
      group.deviation = 1;
      continue;
    }
    for (size_t b : group.rows) group.mean += scores[b] / n;
    double squares = 0;
    for (size_t b : group.rows) squares += (scores[b] - group.mean) * (scores[b] - group.mean);
    group.deviation = std::sqrt(squares / (n - 1));
  }
  return groups;
}

std::vector<double> scores_of(const RewardRows& rows) {
  std::vector<double> scores;
  for (const auto& row : rows.rewards) {
    double s = 0;
    for (double r : row) s += r;
    scores.push_back(s);
  }
  return scores;
}

Matrix spread(const RewardRows& rows, const std::vector<double>& of_row) {
  Matrix out;
  for (size_t b = 0; b < of_row.size(); ++b) {
    out.emplace_back();
    for (uint8_t m : rows.mask[b]) out.back().push_back(m ? of_row[b] : 0);
  }
  return out;
}

Advantages outcome(const RewardRows& rows, const std::vector<double>& of_row) {
  const Matrix spreaded = spread(rows, of_row);
  return {spreaded, spreaded};
}

Matrix masked(Matrix values, const RewardRows& rows) {
  for (size_t b = 0; b < values.size(); ++b) {
    for (size_t t = 0; t < values[b].size(); ++t) {
      if (!rows.mask[b][t]) values[b][t] = 0;
    }
  }
  return values;
}

std::vector<double> grpo_scores(const RewardRows& rows, const std::vector<double>& scores, bool norm_by_std,
                                double epsilon) {
  std::vector<double> out(scores.size());
  for (const auto& [number, group] : groups_of(rows, scores)) {
    for (size_t b : group.rows) {
      out[b] = scores[b] - group.mean;
      if (norm_by_std) out[b] /= group.deviation + epsilon;
    }
  }
  return out;
}

}  // namespace

void check_shape(const RewardRows& rows, const Matrix& values, const char* what) {
  if (values.size() != rows.rewards.size()) {
    throw BadData("{} have {} rows, the rewards {}", what, values.size(), rows.rewards.size());
  }
  for (size_t b = 0; b < values.size(); ++b) {
    if (values[b].size() != rows.rewards[b].size()) {
      throw BadData("{} of row {} have {} positions, the rewards {}", what, b, values[b].size(),
                    rows.rewards[b].size());
    }
  }
}

void check_rows(const RewardRows& rows, bool grouped) {
  if (rows.mask.size() != rows.rewards.size()) {
    throw BadData("the mask has {} rows, the rewards {}", rows.mask.size(), rows.rewards.size());
  }
  for (size_t b = 0; b < rows.mask.size(); ++b) {
    if (rows.mask[b].size() != rows.rewards[b].size()) {
      throw BadData("the mask of row {} has {} positions, the rewards {}", b, rows.mask[b].size(),
                    rows.rewards[b].size());
    }
  }
  if (grouped && rows.group.size() != rows.rewards.size()) {
    throw BadData("{} group numbers for {} rows", rows.group.size(), rows.rewards.size());
  }
}

MaskedMoments masked_moments(const Matrix& values, const std::vector<std::vector<uint8_t>>& mask) {
  const auto over = [&](const auto& f) {
    double total = 0;
    for (size_t b = 0; b < values.size(); ++b) {
      for (size_t t = 0; t < values[b].size(); ++t) {
        if (mask[b][t]) total += f(values[b][t]);
      }
    }
    return total;
  };
  MaskedMoments out;
  const double n = over([](double) { return 1.0; });
  if (n < 1) return out;
  out.mean = over([](double x) { return x; }) / n;
  if (n > 1) out.variance = over([&](double x) { return (x - out.mean) * (x - out.mean); }) / (n - 1);
  return out;
}

Matrix masked_whiten(const Matrix& values, const std::vector<std::vector<uint8_t>>& mask, bool shift_mean) {
  const MaskedMoments moments = masked_moments(values, mask);
  const double scale = 1 / std::sqrt(moments.variance + 1e-8);
  Matrix out = values;
  for (auto& row : out) {
    for (double& x : row) x = (x - moments.mean) * scale + (shift_mean ? 0 : moments.mean);
  }
  return out;
}

Advantages gae(const RewardRows& rows, const Matrix& values, double gamma, double lam, bool whiten) {
  check_rows(rows, false);
  check_shape(rows, values, "values");
  Advantages out{rows.rewards, rows.rewards};
  for (size_t b = 0; b < values.size(); ++b) {
    double next_value = 0, carried = 0, late_reward = 0;
    for (size_t t = values[b].size(); t-- > 0;) {
      if (rows.mask[b][t]) {
        const double delta = rows.rewards[b][t] + late_reward + gamma * next_value - values[b][t];
        carried = delta + gamma * lam * carried;
        next_value = values[b][t];
        late_reward = 0;
      } else {
        late_reward += rows.rewards[b][t];
      }
      out.advantages[b][t] = carried;
      out.returns[b][t] = carried + values[b][t];
    }
  }
  if (whiten) out.advantages = masked_whiten(out.advantages, rows.mask);
  return out;
}

Advantages grpo(const RewardRows& rows, bool norm_by_std, double epsilon) {
  check_rows(rows, true);
  return outcome(rows, grpo_scores(rows, scores_of(rows), norm_by_std, epsilon));
}

Advantages rloo(const RewardRows& rows, bool single_keeps_score) {
  check_rows(rows, true);
  std::vector<double> scores = scores_of(rows);
  for (const auto& [number, group] : groups_of(rows, scores)) {
    const double k = static_cast<double>(group.rows.size());
    for (size_t b : group.rows) {
      if (k > 1) {
        scores[b] = (scores[b] - group.mean) * k / (k - 1);
      } else if (!single_keeps_score) {
        scores[b] = 0;
      }
    }
  }
  return outcome(rows, scores);
}

Advantages opo(const RewardRows& rows) {
  check_rows(rows, true);
  std::vector<double> scores = scores_of(rows);
  for (const auto& [number, group] : groups_of(rows, scores)) {
    if (group.rows.size() == 1) continue;
    double weighed = 0, tokens = 0;
    for (size_t b : group.rows) {
      const double n = static_cast<double>(
          std::count_if(rows.mask[b].begin(), rows.mask[b].end(), [](uint8_t m) { return m != 0; }));
      weighed += n * scores[b];
      tokens += n;
    }
    const double baseline = tokens > 0 ? weighed / tokens : 0;
    for (size_t b : group.rows) scores[b] -= baseline;
  }
  return outcome(rows, scores);
}

Advantages gpg_outcome(const RewardRows& rows) {
  check_rows(rows, true);
  std::vector<double> scores = scores_of(rows);
  const auto given = std::count_if(scores.begin(), scores.end(), [](double s) { return s != 0; });
  const double alpha = static_cast<double>(scores.size()) / static_cast<double>(std::max<int64_t>(given, 1));
  for (const auto& [number, group] : groups_of(rows, scores)) {
    for (size_t b : group.rows) scores[b] = alpha * (scores[b] - group.mean);
  }
  return outcome(rows, scores);
}

Advantages reinforce_plus_plus_baseline(const RewardRows& rows) {
  check_rows(rows, true);
  std::vector<double> scores = scores_of(rows);
  for (const auto& [number, group] : groups_of(rows, scores)) {
    for (size_t b : group.rows) scores[b] -= group.mean;
  }
  const Matrix out = masked(masked_whiten(spread(rows, scores), rows.mask), rows);
  return {out, out};
}

Advantages grpo_passk(const RewardRows& rows, bool norm_by_std, double epsilon) {
  check_rows(rows, true);
  const std::vector<double> scores = scores_of(rows);
  std::vector<double> out(scores.size(), 0);
  for (const auto& [number, group] : groups_of(rows, scores)) {
    if (group.rows.size() < 2) {
      throw BadData("grpo_passk: group {} has one row; allowed: two or more", number);
    }
    std::vector<size_t> order = group.rows;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
    out[order[0]] = scores[order[0]] - scores[order[1]];
    if (norm_by_std) out[order[0]] /= group.deviation + epsilon;
  }
  return outcome(rows, out);
}

Advantages gdpo(const RewardRows& rows, const Matrix& scores, const std::vector<double>& weights,
                double epsilon) {
  check_rows(rows, true);
  if (scores.size() != weights.size() || scores.empty()) {
    throw BadData("gdpo: {} reward components and {} weights; allowed: the same number, at least one",
                  scores.size(), weights.size());
  }
  std::vector<double> total(rows.rewards.size(), 0);
  for (size_t c = 0; c < scores.size(); ++c) {
    if (scores[c].size() != total.size()) {
      throw BadData("gdpo: component {} has {} scores for {} rows", c, scores[c].size(), total.size());
    }
    const std::vector<double> of_rows = grpo_scores(rows, scores[c], true, epsilon);
    for (size_t b = 0; b < total.size(); ++b) total[b] += weights[c] * of_rows[b];
  }
  const Matrix out = masked(masked_whiten(spread(rows, total), rows.mask), rows);
  return {out, out};
}

Advantages reinforce_plus_plus(const RewardRows& rows, double gamma) {
  check_rows(rows, false);
  Matrix returns = rows.rewards;
  for (size_t b = 0; b < returns.size(); ++b) {
    double running = 0;
    for (size_t t = returns[b].size(); t-- > 0;) {
      if (rows.mask[b][t]) running = rows.rewards[b][t] + gamma * running;
      returns[b][t] = rows.mask[b][t] ? running : 0;
    }
  }
  return {masked(masked_whiten(returns, rows.mask), rows), returns};
}

Advantages remax(const RewardRows& rows, const std::vector<double>& baselines) {
  check_rows(rows, false);
  if (baselines.size() != rows.rewards.size()) {
    throw BadData("remax: {} baselines for {} rows", baselines.size(), rows.rewards.size());
  }
  Advantages out{rows.rewards, rows.rewards};
  for (size_t b = 0; b < baselines.size(); ++b) {
    double running = 0;
    for (size_t t = out.returns[b].size(); t-- > 0;) {
      if (rows.mask[b][t]) running += rows.rewards[b][t];
      out.returns[b][t] = running;
      out.advantages[b][t] = running - (rows.mask[b][t] ? baselines[b] : 0);
    }
  }
  return out;
}

}  // namespace titanium
