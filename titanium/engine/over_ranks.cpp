#include "titanium/engine/over_ranks.h"

#include <algorithm>
#include <bit>
#include <string>

#include "titanium/base/error.h"
#include "titanium/batch/pack.h"
#include "titanium/formats/json.h"

namespace titanium {
namespace {

std::vector<Json> json_of_all(const Group& group, const Json& own) {
  std::vector<Json> all;
  for (const std::string& text : group.exchange(own.dump())) all.push_back(Json::parse(text));
  return all;
}

// Numbers that JSON has no word for keep their bits.
Json exact(double x) {
  return std::bit_cast<uint64_t>(x);
}
double number(const Json& bits) {
  return std::bit_cast<double>(bits.get<uint64_t>());
}

}  // namespace

Counts sum_over(const Group& group, const Counts& own) {
  if (group.size() == 1) return own;
  Counts sum;
  for (const Json& one : json_of_all(group, {own.tokens, own.sequences, own.untrained}))
    sum += {one.at(0).get<int64_t>(), one.at(1).get<int64_t>(), one.at(2).get<int64_t>()};
  return sum;
}

Reports sum_over(const Group& group, const Reports& own) {
  if (group.size() == 1) return own;
  Json mine = Json::object();
  for (const auto& [name, r] : own)
    mine[name] = {exact(r.sum), exact(r.count), static_cast<int>(r.op), exact(r.spread)};
  Reports sum;
  for (const Json& one : json_of_all(group, mine)) {
    Reports reports;
    for (const auto& [name, r] : one.items())
      reports[name] = {number(r.at(0)), number(r.at(1)), static_cast<Report::Op>(r.at(2).get<int>()),
                       number(r.at(3))};
    add_reports(sum, reports);
  }
  return sum;
}

std::vector<PackedBatch> equal_in_number(const Group& group,
                                         const std::function<std::vector<PackedBatch>(int64_t at_least)>& cut,
                                         int64_t filler_tokens) {
  std::vector<PackedBatch> own = cut(1);
  if (group.size() == 1) return own;
  while (true) {
    int64_t most = 0, least = INT64_MAX;
    for (const Json& one : json_of_all(group, own.size())) {
      most = std::max(most, one.get<int64_t>());
      least = std::min(least, one.get<int64_t>());
    }
    if (most == least) return own;
    if (static_cast<int64_t>(own.size()) == most) continue;
    own = cut(most);
    while (static_cast<int64_t>(own.size()) < most) own.push_back(pack_one({}, filler_tokens));
  }
}

}  // namespace titanium
