#include "titanium/engine/over_ranks.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "titanium/base/error.h"
#include "titanium/batch/pack.h"
#include "titanium/dist/agree.h"
#include "titanium/formats/json.h"
#include "titanium/weights/hash.h"

namespace titanium {
namespace {

std::vector<Json> json_of_all(const Group& group, const Json& own) {
  std::vector<Json> all;
  for (const std::string& text : group.exchange(own.dump())) all.push_back(Json::parse(text));
  return all;
}

// Same size on all ranks; compared and added up as it is.
struct Meeting {
  uint64_t arguments = 0, contents = 0;
  int64_t samples = 0;
  Counts counts;
};

template <typename T>
void add(Hash64& hash, const std::vector<T>& values) {
  const size_t size = values.size();
  hash.add(std::as_bytes(std::span(&size, 1)));
  hash.add(std::as_bytes(std::span(values)));
}
void add(Hash64& hash, const std::string& text) {
  add(hash, std::vector<char>(text.begin(), text.end()));
}
void add(Hash64& hash, const std::vector<Sample>& samples) {
  for (const Sample& sample : samples) {
    add(hash, sample.ids);
    add(hash, sample.loss_mask);
    add(hash, std::vector<double>{sample.temperature});
    add(hash, std::vector<int64_t>{sample.group});
    for (const auto& [name, column] : sample.columns) {
      add(hash, name);
      add(hash, column);
    }
    for (const auto& [name, value] : sample.seq_columns) {
      add(hash, name);
      add(hash, std::vector<double>{value});
    }
  }
}

template <typename Add>
uint64_t hash_of(const Add& add) {
  Hash64 hash;
  add(hash);
  return hash.value();
}

}  // namespace

GlobalBatch meet(const Mesh& mesh, const std::string& arguments, const std::vector<Sample>& samples) {
  const Group& all = mesh.all();
  Meeting mine;
  mine.counts = agreed(all, [&] { return count(samples); });
  if (all.size() == 1) return {mine.counts, 0};
  mine.arguments = hash_of([&](Hash64& hash) { add(hash, arguments); });
  mine.samples = static_cast<int64_t>(samples.size());
  if (mesh.tp().size() * mesh.pp().size() > 1)
    mine.contents = hash_of([&](Hash64& hash) { add(hash, samples); });
  std::vector<Meeting> of;
  for (const std::string& bytes : all.exchange({reinterpret_cast<const char*>(&mine), sizeof mine})) {
    if (bytes.size() != sizeof mine)
      throw Bug("a rank comes with {} bytes, not {}", bytes.size(), sizeof mine);
    std::memcpy(&of.emplace_back(), bytes.data(), sizeof mine);
  }
  if (std::any_of(of.begin(), of.end(), [&](const Meeting& one) { return one.arguments != of[0].arguments; }))
    agree_on(all, "the call", arguments);  // which line it is
  const auto first_of = [&](int rank) {    // of its model-parallel group
    Coordinates at = coordinates_of(mesh.dims(), rank);
    at.tp = at.pp = 0;
    return rank_of(mesh.dims(), at);
  };
  GlobalBatch batch;
  for (int rank = 0; rank < all.size(); ++rank) {
    const int source = first_of(rank);
    if (source != rank) {
      if (of[rank].contents == of[source].contents) continue;
      throw BadConfig(
          "the batch of rank {} ({} samples) is not that of rank {} ({} samples), which is of the same "
          "model-parallel group: its ranks are given the same samples",
          rank, of[rank].samples, source, of[source].samples);
    }
    batch.counts += of[rank].counts;
    if (rank < first_of(mesh.rank())) batch.first += of[rank].samples;
  }
  return batch;
}

Reports sum_over(const Group& group, const Reports& own) {
  if (group.size() == 1) return own;
  Reports sum;
  for (const std::string& bytes : group.exchange(to_bytes(own))) add_reports(sum, reports_from(bytes));
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
    own = cut(most);  // by those that have as many too: all ranks of the run make the same calls
    while (static_cast<int64_t>(own.size()) < most) own.push_back(pack_one({}, filler_tokens));
  }
}

}  // namespace titanium
