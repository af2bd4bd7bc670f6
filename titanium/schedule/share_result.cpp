#include "titanium/schedule/share_result.h"

#include <ATen/ATen.h>

#include <array>
#include <cstring>
#include <string>

#include "titanium/base/error.h"

namespace titanium {
namespace {

constexpr at::Tensor TokenStats::*kStats[] = {&TokenStats::logprob, &TokenStats::entropy,
                                              &TokenStats::sum_pi_squared, &TokenStats::value};

// What the last stage knows besides tensors, as bytes.
std::string pack(const WorkResult& result) {
  std::string text;
  const auto put = [&](const auto& value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  put(result.loss.loss.item<double>());
  for (const double loss : result.losses) put(loss);
  for (const TokenStats& stats : result.stats) {
    for (const auto member : kStats) put((stats.*member).defined());
  }
  return text + to_bytes(result.loss.reports);
}

void unpack(const std::string& text, WorkResult& result, std::vector<std::array<bool, 4>>& defined) {
  size_t at = 0;
  const auto take = [&](auto& value) {
    if (at + sizeof value > text.size()) throw Bug("the result of the last pipeline stage is cut off");
    std::memcpy(&value, text.data() + at, sizeof value);
    at += sizeof value;
  };
  double loss = 0;
  take(loss);
  result.loss.loss.fill_(loss);
  for (double& one : result.losses) take(one);
  for (auto& flags : defined) {
    for (bool& flag : flags) take(flag);
  }
  result.loss.reports = reports_from(text.substr(at));
}

}  // namespace

void share_result(const Group& ranks, int last_rank, const std::vector<PackedBatch>& batches,
                  at::ScalarType compute, WorkResult& result) {
  if (ranks.size() == 1) return;
  const bool has_it = ranks.rank() == last_rank;
  const std::vector<std::string> all = ranks.exchange(has_it ? pack(result) : "");
  std::vector<std::array<bool, 4>> defined(result.stats.size());
  WorkResult seen = result;
  unpack(all[last_rank], has_it ? seen : result, defined);
  const at::ScalarType dtype = compute == at::kDouble ? at::kDouble : at::kFloat;
  for (size_t i = 0; i < result.stats.size(); ++i) {
    for (size_t k = 0; k < 4; ++k) {
      if (!defined[i][k]) continue;
      at::Tensor& statistic = result.stats[i].*kStats[k];
      if (!has_it) statistic = at::empty({batches[i].size()}, at::TensorOptions().dtype(dtype));
      statistic = statistic.contiguous();
      ranks.broadcast(statistic, last_rank);
    }
  }
}

}  // namespace titanium
